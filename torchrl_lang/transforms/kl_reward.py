"""The ``KLRewardTransform`` that TorchRL removed, with the sign of its formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.controllers import KLController
from torchrl_lang.transforms.kl_constrained import KLConstrainedTransform
from torchrl_lang.transforms.references import as_policy

__all__ = ["KLRewardTransform"]


class KLRewardTransform(KLConstrainedTransform):
    """``R - coef * KL(actor now || actor as it was)``, for any actor: a drop-in for TorchRL's old one.

    The divergence is the log-ratio of the sampled action (k1). For estimators, controllers and limits use
    :class:`KLConstrainedTransform`.

    In an environment, an action without a log-probability (a random one, as of ``check_env_specs``) is scored by
    ``actor`` as it is now. In a batch, which may come from an older policy, a missing log-probability is an error.

    Args:
        actor: the policy, of which a frozen copy is taken as it is now.
        coef: coefficient of the divergence.
        in_keys: the reward, default ``"reward"`` in the action's group.
        out_keys: the adjusted reward, default in place of the raw one.
        requires_grad: gradients flow through the copy.

    Examples:
        >>> import torch
        >>> from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule
        >>> from torchrl.envs import CatTensors, PendulumEnv, TransformedEnv, UnsqueezeTransform
        >>> from torchrl.modules import ProbabilisticActor, TanhNormal
        >>> from torchrl_lang.transforms import KLRewardTransform
        >>> _ = torch.manual_seed(0)
        >>> angles = ["th", "thdot"]
        >>> env = TransformedEnv(PendulumEnv(), UnsqueezeTransform(-1, in_keys=angles, in_keys_inv=angles))
        >>> env = env.append_transform(CatTensors(angles, "observation", del_keys=False))
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), NormalParamExtractor())
        >>> module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> actor = ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal,
        ...                            return_log_prob=True, default_interaction_type=InteractionType.RANDOM)
        >>> env = env.append_transform(KLRewardTransform(actor, 0.1, out_keys="reward_kl"))
        >>> step = env.rollout(10, actor)["next"]
        >>> torch.allclose(step["reward_kl"], step["reward"], atol=1e-4)  # nothing has been trained
        True
        >>> with torch.no_grad():
        ...     _ = net[0].bias.add_(1.0)
        >>> step = env.rollout(10, actor)["next"]
        >>> torch.allclose(step["reward_kl"], step["reward"] - 0.1 * step["kl"].unsqueeze(-1), atol=1e-4)
        True
        >>> bool((step["reward_kl"] == step["reward"]).any())
        False
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
        if isinstance(actor, TensorDictModuleBase):
            self.divergence.acting = as_policy(actor)
