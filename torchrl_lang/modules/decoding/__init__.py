"""Cached batched decoding: sampling, greedy, beam, best of N, with value guidance."""

from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.decoding.decoder import Decoder
from torchrl_lang.modules.decoding.distribution import UtteranceDistribution
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.language_model_runner import LanguageModelRunner
from torchrl_lang.modules.decoding.model_runner import CachedRunner, ModelRunner, RecomputingRunner
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.sampling import Prompt, Utterances, pick, sample_utterances
from torchrl_lang.modules.decoding.search import beam_search
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor

__all__ = [
    "CachedRunner",
    "Decoder",
    "LanguageModelRunner",
    "NextTokenDistribution",
    "Prompt",
    "ModelRunner",
    "RecomputingRunner",
    "RowCache",
    "UtteranceActor",
    "UtteranceDistribution",
    "Utterances",
    "ValueGuidance",
    "beam_search",
    "pick",
    "sample_utterances",
]
