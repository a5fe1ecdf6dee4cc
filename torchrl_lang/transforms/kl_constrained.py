"""The whole chain: reference, divergence, adjusted reward and limit; and the transform that TorchRL removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs.transforms import Compose, Transform

from torchrl_lang._checks import check_options, torchrl_names
from torchrl_lang.functional.kl import KLDirection
from torchrl_lang.modules.controllers import (
    AdaptiveKLController,
    KLController,
    LagrangeKLController,
    ScheduledKLController,
    one_number,
)
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, frozen_copy
from torchrl_lang.transforms.base import ActionKeys
from torchrl_lang.transforms.divergence import (
    Estimator,
    KLDivergenceTransform,
    MissingLogProb,
    ReferenceModelLogProbTransform,
)
from torchrl_lang.transforms.language_references import as_policy, as_reference
from torchrl_lang.transforms.references import Reference
from torchrl_lang.transforms.reward_adjustment import KLLimitTransform, RewardAdjustmentTransform


class KLConstrainedTransform(Compose):
    """Penalizes divergence from a reference policy in the reward: :class:`ReferenceModelLogProbTransform`,
    :class:`KLDivergenceTransform`, :class:`RewardAdjustmentTransform` and, with a ``limit``, :class:`KLLimitTransform`.

    Use it in one place: an environment, a replay buffer (``append_transform``) or a collector (``postproc``). A second
    one raises, since the penalty would count twice. The kind of actor decides what is scored: single actions; turns, of
    an :class:`~torchrl_lang.modules.UtteranceActor`; whole rows, of ``RowReference(frozen_copy(utterance_actor))``,
    which compare with the ``token_log_prob`` of acting. A bare :func:`~torchrl_lang.modules.language_actor` scores
    whole rows at temperature 1 over the whole vocabulary: give it together with ``policy=``, or with log-probabilities
    made by :func:`~torchrl_lang.modules.row_log_prob`.

    Rows made from an environment's steps keep the adjusted reward, the penalty of a turn at its last token, with
    ``raw_reward`` beside it. To adjust rows token by token instead, leave the transform out of the environment.

    **Coming from TorchRL's old** ``KLRewardTransform(actor, coef, in_keys, out_keys, requires_grad)``: the first five
    arguments are the same, ``coef`` is a buffer that can be written, and ``in_keys`` and ``out_keys`` begin with the
    rewards. The reward is ``R - coef * KL`` (the old code had the sign reversed); random policies need
    ``missing="zero"``; nested actions are found, or an error is raised, where the penalty was silently left out. Over
    ``ParallelEnv`` and ``SerialEnv`` it goes outside: ``TransformedEnv(ParallelEnv(...), KLConstrainedTransform(a))``.

    Args:
        actor: the reference as it is now, e.g. the policy before training; or whatever else
            :class:`ReferenceModelLogProbTransform` takes.
        coef: coefficient of the divergence: a number, or a :class:`KLController`.
        in_keys: the rewards; default ``"reward"`` (``"token_reward"`` for rows), in the action's group.
        out_keys: the adjusted rewards, default in place of the raw ones, which move to ``"raw_reward"``.
        requires_grad: gradients flow through the penalty, to the policy's log-probability and to the copied reference,
            whose weights are then in ``parameters()`` and in the ``state_dict``.
        estimator: see :class:`KLDivergenceTransform`; use ``"k1"`` in a reward.
        direction: see :class:`KLDivergenceTransform`.
        per: see :class:`KLDivergenceTransform`.
        placement: ``"token"`` or ``"last"``, see :class:`RewardAdjustmentTransform`.
        log_prob_key: the policy's log-probability, default as the actor writes it.
        action_key: the action, default as the actor writes it.
        mask_key: see :class:`KLDivergenceTransform`; default ``"agent_mask"`` for rows.
        policy: the actor that is trained, for ``estimator="exact"`` and for data without log-probabilities.
        limit: nats at which an episode is truncated, see :class:`KLLimitTransform`.
        missing: see :class:`KLDivergenceTransform`.
        embed_weights: keep the reference's weights in the ``state_dict``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor, TanhNormal
        >>> from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
        >>> module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> actor = ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal,
        ...                            return_log_prob=True, default_interaction_type=InteractionType.RANDOM)
        >>> transform = KLConstrainedTransform(actor, AdaptiveKLController(0.1, target=0.01))
        >>> with torch.no_grad():
        ...     _ = net[0].bias.add_(1.0)  # the policy moves, the reference stays
        >>> steps = actor(TensorDict(observation=torch.randn(256, 3), batch_size=[256]))
        >>> steps["next"] = TensorDict(reward=torch.zeros(256, 1), batch_size=[256])
        >>> steps = transform(steps)
        >>> bool(steps["next", "reward"].mean() < 0)
        True
        >>> transform.update(steps)
        >>> bool(transform.coef > 0.1)
        True
    """

    def __init__(
        self,
        actor: Any,
        coef: float | Tensor | KLController = 1.0,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        requires_grad: bool = False,
        *,
        estimator: Estimator = "k1",
        direction: KLDirection = "reverse",
        per: Literal["token", "sequence"] = "token",
        placement: Literal["token", "last"] = "token",
        log_prob_key: NestedKey | Sequence[NestedKey] | None = None,
        action_key: NestedKey | Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = None,
        policy: Any = None,
        limit: float | None = None,
        missing: MissingLogProb = "error",
        embed_weights: bool = False,
    ) -> None:
        if requires_grad:
            if isinstance(actor, (Reference, FrozenActor, str, tuple)):
                raise ValueError("requires_grad=True is for an actor of which the transform makes the copy.")
            actor = frozen_copy(actor, differentiable=True)
        reference = as_reference(actor, action_key=action_key)
        action_keys = reference.action_keys
        mask_key = action_keys.mask if mask_key is None else mask_key
        policy = None if policy is None else as_policy(policy, rows=action_keys == ActionKeys.row())
        chain: list[Transform] = []
        if estimator != "exact":
            keys = {"out_key": action_keys.ref_log_prob, "embed_weights": embed_weights}
            chain.append(ReferenceModelLogProbTransform(reference, **keys))
        divergence = KLDivergenceTransform(
            estimator,
            direction=direction,
            per=per,
            log_prob_key=list(action_keys.log_prob) if log_prob_key is None else log_prob_key,
            ref_log_prob_key=action_keys.ref_log_prob,
            mask_key=mask_key,
            out_key=action_keys.kl,
            policy=policy,
            reference=reference if estimator == "exact" else None,
            missing=missing,
            embed_weights=embed_weights and estimator == "exact",
            differentiable=requires_grad,
        )
        reward = RewardAdjustmentTransform(
            coef,
            reward_key=action_keys.reward if in_keys is None else in_keys,
            kl_key=action_keys.kl,
            out_key=out_keys,
            placement=placement,
            mask_key=mask_key,
        )
        chain += [divergence, reward]
        if limit is not None:
            chain.append(KLLimitTransform(limit, kl_key=action_keys.kl))
        super().__init__(*chain)

    @property
    def divergence(self) -> KLDivergenceTransform:
        """The transform of the chain that computes the divergence."""
        return next(t for t in self.transforms if isinstance(t, KLDivergenceTransform))

    @property
    def reward_adjustment(self) -> RewardAdjustmentTransform:
        """The transform of the chain that adjusts the reward."""
        return next(t for t in self.transforms if isinstance(t, RewardAdjustmentTransform))

    @property
    def controller(self) -> KLController:
        """The controller of the coefficient."""
        return self.reward_adjustment.controller

    @property
    def coef(self) -> Tensor:
        """The coefficient, a buffer ``[]``: ``coef.fill_(0.2)`` and ``transform.coef = 0.2`` change it in place.

        Of a number, float32, and ``.to(...)`` converts it; a controller keeps its dtype and device.

        Raises:
            ValueError: on assignment, the value is out of the controller's range, or the controller computes its
                coefficient from other state (Lagrange, scheduled), so that the next update would overwrite it.
            TypeError: on assignment, the value is not one number.
        """
        return self.controller.coef

    @coef.setter
    def coef(self, value: Tensor | float) -> None:
        number, controller = one_number("coef", value), self.controller
        if isinstance(controller, (LagrangeKLController, ScheduledKLController)):
            advice = "give the transform a number or an AdaptiveKLController, whose coefficient can be set"
            raise ValueError(f"The next update of {controller} would overwrite coef={number}: {advice}.")
        adaptive = isinstance(controller, AdaptiveKLController)
        check_options(coef=(number, f"[{controller.min_coef}, {controller.max_coef}]" if adaptive else "[0, inf)"))
        controller.coef.fill_(number)

    @property
    def in_keys(self) -> list[NestedKey]:
        """The rewards, and then the other entries that the chain reads; in a replay buffer also those of ``"next"``."""
        chain = self._reward_first
        return self._in_place(
            [k for t in chain for k in t.in_keys if not any(k in o.out_keys for o in chain[1:] if o is not t)]
        )

    @property
    def out_keys(self) -> list[NestedKey]:
        """The adjusted rewards, and then the other entries that it writes; in a replay buffer also in ``"next"``."""
        return self._in_place([key for t in self._reward_first for key in t.out_keys])

    @property
    def _reward_first(self) -> list[Transform]:
        return sorted(self.transforms, key=lambda t: t is not self.reward_adjustment)

    def _in_place(self, keys: list[NestedKey]) -> list[NestedKey]:
        """Keys of an environment or, in a chain without one, as of a replay buffer, of rows and of steps."""
        buffered = self.__dict__["_container"] is not None and self.divergence.environment is None
        return list(dict.fromkeys(keys + [unravel_key(("next", key)) for key in keys] * buffered))

    def update(self, tensordict: TensorDictBase) -> None:
        """Update the controller with a batch that this transform has adjusted: steps with their ``"next"``, or rows.

        Raises:
            KeyError: the batch has no divergence.
        """
        self.reward_adjustment.update(tensordict)

    def clone(self) -> Self:
        """A copy without an environment; the frozen model and the controller are the same ones."""
        other = Transform.clone(self)  # Compose.clone returns a plain Compose
        other._modules["transforms"] = nn.ModuleList(t.clone() for t in self.transforms)
        for transform in other.transforms:
            transform.set_container(other)
        return other


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
        requires_grad: gradients flow through the copy, whose weights are then in ``parameters()``.

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

    @torchrl_names()
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
