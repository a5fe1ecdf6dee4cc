"""Models: trunks over Hugging Face causal LMs, value and Q heads, actors, cached decoding, and saving."""

from torchrl_lang.modules.action_values import ActionValueHead
from torchrl_lang.modules.actor import (
    ACTION_VALUE,
    LOGITS,
    NEXT_TOKEN,
    STATE_VALUE,
    UTTERANCE_VALUE,
    ActorParts,
    language_actor,
    qvalue_module,
    split_actor,
    value_module,
)
from torchrl_lang.modules.agilerl.checkpoint import AgileRLAgent, read_agilerl
from torchrl_lang.modules.candidate_sampler import CandidateSampler
from torchrl_lang.modules.chai_actor import CHAIActor
from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.decoding.distribution import UtteranceDistribution
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.likelihood_guidance import LikelihoodGuidance
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.stop_strings import StopStrings
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.decoding.utterance_guidance import UtteranceValueGuidance
from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.freezing import train_top_layers, transformer_blocks
from torchrl_lang.modules.language_model import causal_lm, fit_vocabulary, load_causal_lm
from torchrl_lang.modules.large_vocabulary import LARGE_VOCABULARY, default_qvalue_head
from torchrl_lang.modules.mixed_policy import MixedPolicy
from torchrl_lang.modules.privileged_trunk import PrivilegedTrunk
from torchrl_lang.modules.qvalue_head import QValueHead
from torchrl_lang.modules.return_conditioned_actor import ReturnConditionedActor, condition_on_returns
from torchrl_lang.modules.return_embedding import ReturnEmbedding
from torchrl_lang.modules.row_scoring import row_log_prob
from torchrl_lang.modules.row_token_actor import RowTokenActor, RowTokenDistribution
from torchrl_lang.modules.saved_agent import SavedAgent, load_agent, push_agent, save_agent
from torchrl_lang.modules.saving import SavedModel, language_model_of, load_language_model, save_language_model
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.modules.trunk import HIDDEN, HIDDEN_PRE_NORM, Trunk, trunk_module
from torchrl_lang.modules.utterance_qvalue_head import UtteranceQValueHead
from torchrl_lang.modules.value_head import ValueHead
from torchrl_lang.modules.with_features import with_features
from torchrl_lang.schema import IS_EXAMPLE, TRAIN_MASK

__all__ = [
    "ACTION_VALUE",
    "HIDDEN",
    "HIDDEN_PRE_NORM",
    "IS_EXAMPLE",
    "LARGE_VOCABULARY",
    "LOGITS",
    "NEXT_TOKEN",
    "STATE_VALUE",
    "TRAIN_MASK",
    "UTTERANCE_VALUE",
    "ActionValueHead",
    "ActorParts",
    "AgileRLAgent",
    "CHAIActor",
    "CandidateSampler",
    "LikelihoodGuidance",
    "MixedPolicy",
    "NextTokenDistribution",
    "FeatureEmbedding",
    "PrivilegedTrunk",
    "QValueHead",
    "ReturnConditionedActor",
    "ReturnEmbedding",
    "RowCache",
    "RowTokenActor",
    "RowTokenDistribution",
    "SavedAgent",
    "SavedModel",
    "StopStrings",
    "TiedQValueHead",
    "Trunk",
    "UtteranceActor",
    "UtteranceDistribution",
    "UtteranceQValueHead",
    "UtteranceValueGuidance",
    "ValueGuidance",
    "ValueHead",
    "causal_lm",
    "condition_on_returns",
    "default_qvalue_head",
    "fit_vocabulary",
    "language_actor",
    "language_model_of",
    "load_agent",
    "load_causal_lm",
    "load_language_model",
    "push_agent",
    "qvalue_module",
    "read_agilerl",
    "row_log_prob",
    "save_agent",
    "save_language_model",
    "split_actor",
    "train_top_layers",
    "transformer_blocks",
    "trunk_module",
    "value_module",
    "with_features",
]
