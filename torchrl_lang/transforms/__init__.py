"""Transforms: KL penalties against a frozen reference, for any actor, rewards of turns, and advantages of rows."""

from torchrl_lang.modules.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    KLController,
    LagrangeKLController,
    ScheduledKLController,
)
from torchrl_lang.modules.frozen.frozen_copy import adapters_off, frozen_copy
from torchrl_lang.transforms.divergence import KLDivergenceTransform, ReferenceModelLogProbTransform
from torchrl_lang.transforms.kl_constrained import KLConstrainedTransform, KLRewardTransform
from torchrl_lang.transforms.language_references import RowReference, WrapperReference
from torchrl_lang.transforms.references import ActorReference, ColumnReference, FunctionReference
from torchrl_lang.transforms.reward_adjustment import KLLimitTransform, RewardAdjustmentTransform
from torchrl_lang.transforms.row_advantage import RowAdvantage
from torchrl_lang.transforms.turn_rewards import EntryReward, LivingCost, TurnRewardTransform

__all__ = [
    "ActorReference",
    "AdaptiveKLController",
    "ColumnReference",
    "ConstantKLController",
    "EntryReward",
    "FunctionReference",
    "KLConstrainedTransform",
    "KLController",
    "KLDivergenceTransform",
    "KLLimitTransform",
    "KLRewardTransform",
    "LagrangeKLController",
    "LivingCost",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "RowAdvantage",
    "RowReference",
    "ScheduledKLController",
    "TurnRewardTransform",
    "WrapperReference",
    "adapters_off",
    "frozen_copy",
]
