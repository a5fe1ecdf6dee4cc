"""Cached batched decoding: sampling, greedy, beam, best of N, with value guidance."""

from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.decoding.decoder import Decoder
from torchrl_lang.modules.decoding.distribution import UtteranceDistribution
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.model import ModelReader
from torchrl_lang.modules.decoding.readers import CachedReader, Reader, RecomputingReader
from torchrl_lang.modules.decoding.rule import NextTokenRule
from torchrl_lang.modules.decoding.sampling import Prompt, Utterances, pick, sample_utterances
from torchrl_lang.modules.decoding.search import beam_search, best_of
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor

__all__ = [
    "CachedReader",
    "Decoder",
    "ModelReader",
    "NextTokenRule",
    "Prompt",
    "Reader",
    "RecomputingReader",
    "RowCache",
    "UtteranceActor",
    "UtteranceDistribution",
    "Utterances",
    "ValueGuidance",
    "beam_search",
    "best_of",
    "pick",
    "sample_utterances",
]
