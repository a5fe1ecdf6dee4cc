"""Models: trunks over Hugging Face causal LMs, value and Q heads, actors, cached decoding, and saving."""

from torchrl_lang.modules.actor import LanguageActor, language_actor, with_features
from torchrl_lang.modules.agilerl.checkpoint import read_agilerl
from torchrl_lang.modules.chai import CandidateSampler, CHAIActor
from torchrl_lang.modules.decoding.guidance import UtteranceValueGuidance, ValueGuidance
from torchrl_lang.modules.decoding.next_token import StopStrings
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.drawn_utterances import draw_utterances, with_drawn
from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.frozen.lower_layers import train_top_layers, with_frozen_states
from torchrl_lang.modules.head_values import qvalue_module, row_value_module, value_module
from torchrl_lang.modules.heads import QValueHead, TiedQValueHead, UtteranceQValueHead, ValueHead, default_qvalue_head
from torchrl_lang.modules.language_model import causal_lm, load_causal_lm
from torchrl_lang.modules.mixed_policy import MixedPolicy
from torchrl_lang.modules.privileged_trunk import PrivilegedTrunk
from torchrl_lang.modules.returns import ReturnConditionedActor, ReturnEmbedding, condition_on_returns
from torchrl_lang.modules.row_scoring import row_log_prob
from torchrl_lang.modules.row_token_actor import RowTokenActor, WrapperActor
from torchrl_lang.modules.save import load_agent, load_language_model, push_agent, save_agent, save_language_model
from torchrl_lang.modules.trunk import Trunk

__all__ = [
    "CHAIActor",
    "CandidateSampler",
    "FeatureEmbedding",
    "LanguageActor",
    "MixedPolicy",
    "PrivilegedTrunk",
    "QValueHead",
    "ReturnConditionedActor",
    "ReturnEmbedding",
    "RowTokenActor",
    "StopStrings",
    "TiedQValueHead",
    "Trunk",
    "UtteranceActor",
    "UtteranceQValueHead",
    "UtteranceValueGuidance",
    "ValueGuidance",
    "ValueHead",
    "WrapperActor",
    "causal_lm",
    "condition_on_returns",
    "default_qvalue_head",
    "draw_utterances",
    "language_actor",
    "load_agent",
    "load_causal_lm",
    "load_language_model",
    "push_agent",
    "qvalue_module",
    "read_agilerl",
    "row_log_prob",
    "row_value_module",
    "save_agent",
    "save_language_model",
    "train_top_layers",
    "value_module",
    "with_drawn",
    "with_features",
    "with_frozen_states",
]
