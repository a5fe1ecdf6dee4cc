"""The transform that TorchRL once had, with the penalty's sign as its formula says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from torch import Tensor

from torchrl_lang.transforms.controllers import KLController
from torchrl_lang.transforms.kl_constrained import KLConstrainedTransform

__all__ = ["KLRewardTransform"]


class KLRewardTransform(KLConstrainedTransform):
    """``R - coef * KL(actor now || actor as it was)``, for any actor: a drop-in for TorchRL's old one.

    The divergence is the log-ratio of the sampled action (k1), as it was there. For everything else, estimators,
    controllers, limits, use :class:`KLConstrainedTransform`, of which this is the plain case.

    Args:
        actor: the policy, of which a frozen copy is taken as it is now.
        coef: of the divergence.
        in_keys: the reward, default ``"reward"`` in the action's group.
        out_keys: where the adjusted reward goes, default over the raw one.
        requires_grad: gradients flow through the copy.

    Examples:
        >>> import torch
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.modules import ProbabilisticActor, TanhNormal
        >>> from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
        >>> from torchrl_lang.transforms import KLRewardTransform
    """

    def __init__(
        self,
        actor: Any,
        coef: float | Tensor | KLController = 1.0,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        requires_grad: bool = False,
    ) -> None:
        super().__init__(actor, coef, in_keys, out_keys, requires_grad)
