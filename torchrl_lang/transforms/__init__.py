"""Transforms: KL penalties against a frozen reference, for any actor, and additional rewards of turns."""

from torchrl_lang.modules.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    KLController,
    LagrangeKLController,
    ScheduledKLController,
    as_controller,
)
from torchrl_lang.modules.frozen.fingerprint import fingerprint
from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, FrozenActor, adapters_off, frozen_copy
from torchrl_lang.modules.frozen.lower_layers import SharedLowerLayers, shared_depth
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.kl_constrained import KLConstrainedTransform
from torchrl_lang.transforms.kl_divergence import KLDivergenceTransform
from torchrl_lang.transforms.kl_limit import KLLimitTransform
from torchrl_lang.transforms.kl_reward import KLRewardTransform
from torchrl_lang.transforms.reference_log_prob import ReferenceModelLogProbTransform
from torchrl_lang.transforms.references import (
    ActorReference,
    ColumnReference,
    FunctionReference,
    Reference,
    RowReference,
    UtteranceReference,
    WrapperReference,
    as_reference,
)
from torchrl_lang.transforms.reward_adjustment import RewardAdjustmentTransform
from torchrl_lang.transforms.turn_rewards import (
    AdmissibleBonus,
    InvalidCommandPenalty,
    LivingCost,
    ScoreReward,
    TurnRewardTransform,
    WinReward,
)

__all__ = [
    "ActorReference",
    "AdaptiveKLController",
    "AdmissibleBonus",
    "ColumnReference",
    "ConstantKLController",
    "FrozenActor",
    "FunctionReference",
    "InvalidCommandPenalty",
    "KLConstrainedTransform",
    "KLController",
    "KLDivergenceTransform",
    "KLLimitTransform",
    "KLRewardTransform",
    "LagrangeKLController",
    "ActionKeys",
    "CurrentPolicy",
    "LivingCost",
    "Reference",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "RowReference",
    "ScheduledKLController",
    "ScoreReward",
    "SharedLowerLayers",
    "TurnRewardTransform",
    "UtteranceReference",
    "WinReward",
    "WrapperReference",
    "adapters_off",
    "as_controller",
    "as_reference",
    "fingerprint",
    "frozen_copy",
    "shared_depth",
]
