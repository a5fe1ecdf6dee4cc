"""The reward less a multiple of the divergence."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded

from torchrl_lang.modules.controllers import KLController, as_controller
from torchrl_lang.schema import RAW_REWARD, REWARD
from torchrl_lang.transforms.base import ActionTransform, required, set_spec
from torchrl_lang.transforms.keys import KL, key_list, last_name, sibling

__all__ = ["RewardAdjustmentTransform"]


class RewardAdjustmentTransform(ActionTransform):
    """Makes the reward ``R - coef * KL`` and keeps the raw one.

    In an environment the raw reward is an observation; TorchRL's ``RewardSum`` of it goes before this transform.

    The divergence is brought to the reward's shape: one value an action becomes ``[*B, 1]``, tokens of an utterance are
    summed into its reward, tokens of a row stay with the reward of each token.

    Args:
        coef: a number, or a :class:`KLController` that changes it.
        reward_key: the reward; several keys are adjusted by the same divergence.
        kl_key: the divergence, from :class:`KLDivergenceTransform`.
        out_key: where the adjusted reward goes, as many as there are rewards; default over the raw one.
        raw_key: where the raw reward is kept when it is written over, one a reward; default ``"raw_reward"`` beside it,
            ``"raw_"`` and its name where there are several. Rows made of an environment's steps take it along, so that
            a second penalty is refused, where its name ends in ``"raw_reward"``.
        placement: ``"token"`` takes each token's divergence off its own reward; ``"last"`` the sum over the row off the
            reward of the last token that the agent wrote.
        mask_key: for ``"last"``: bool ``[*B, T]``, the tokens that the agent wrote.
        auto_update: hand the mean divergence of every batch to the controller, after the batch was adjusted: of a
            sequence where the data are rows or utterances, of an action where they are steps.
        measured_keys: entries of the policy without which a divergence was not measured but made up (of a random
            policy), so that ``auto_update`` leaves it out.

    Raises:
        ValueError: options contradict each other; on calls, shapes do not fit, or the reward was adjusted before.
        KeyError: on calls, the reward or the divergence is missing.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.transforms import RewardAdjustmentTransform
        >>> step = TensorDict(reward=torch.tensor([[1.0], [1.0]]), kl=torch.tensor([0.0, 2.0]), batch_size=[2])
        >>> out = RewardAdjustmentTransform(0.25)(step)
        >>> out["reward"].flatten(), out["raw_reward"].flatten()
        (tensor([1.0000, 0.5000]), tensor([1., 1.]))
    """

    def __init__(
        self,
        coef: float | Tensor | KLController = 1.0,
        *,
        reward_key: NestedKey | Sequence[NestedKey] = REWARD,
        kl_key: NestedKey = KL,
        out_key: NestedKey | Sequence[NestedKey] | None = None,
        raw_key: NestedKey | Sequence[NestedKey] | None = None,
        raw_name: str = RAW_REWARD,
        placement: Literal["token", "last"] = "token",
        mask_key: NestedKey | None = None,
        auto_update: bool = False,
        measured_keys: Sequence[NestedKey] = (),
    ) -> None:
        if placement not in ("token", "last"):
            raise ValueError(f"placement must be 'token' or 'last', got {placement!r}.")
        if placement == "last" and mask_key is None:
            raise ValueError("placement='last' needs mask_key=, the mask of the tokens that the agent wrote.")
        rewards = key_list(reward_key)
        out = rewards if out_key is None else key_list(out_key)
        raw = _raw_keys(rewards, raw_name) if raw_key is None else key_list(raw_key)
        if not len(rewards) == len(out) == len(raw):
            raise ValueError(f"As many rewards as keys for them, got {rewards}, out_key={out} and raw_key={raw}.")
        kept = {key: store for key, goal, store in zip(rewards, out, raw, strict=True) if goal == key}
        super().__init__([*out, *kept.values()])
        self.reward_keys = rewards
        self.adjusted_keys = out
        self.raw_keys = kept
        self._marks = dict(zip(rewards, raw, strict=True))
        self.kl_key = key_list(kl_key)[0]
        self.placement = placement
        self.mask_key = mask_key
        self.auto_update = auto_update
        self.measured_keys = list(measured_keys)
        self.controller = as_controller(coef)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adjust the rewards of a batch; the batch given stays as it was.

        Raises:
            ValueError: the batch already has a raw reward, so it was adjusted before.
        """
        step = tensordict.get("next", None)
        self._refuse_twice((tensordict if step is None else step).keys(True, True))
        return super().forward(tensordict)

    def _refuse_twice(self, present: Collection[NestedKey]) -> None:
        for reward, raw in self._marks.items():
            if raw in present:
                raise ValueError(
                    f"The reward {reward!r} was adjusted before (without the penalty it is {raw!r}), and the penalty "
                    "would count twice: use the transform in one place, environment, collector, rows or replay buffer. "
                    "Rows can be made with the environment's own rewards, rows_from_rollout(..., reward_key=None). For "
                    "a second reference give this one a raw_key= of its own (name= in KLConstrainedTransform)."
                )

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        name = type(self).__name__
        kl = required(name, self.kl_key, "Put KLDivergenceTransform before it.", out, root)
        kl_here = self._on_last(kl, root) if self.placement == "last" else kl
        # The largest number in place of infinity: a coefficient of zero times infinity would be no number at all.
        penalty = self.controller() * kl_here.clamp_max(torch.finfo(kl.dtype).max)
        for reward_key, out_key in zip(self.reward_keys, self.adjusted_keys, strict=True):
            reward = required(name, reward_key, "Name the reward with reward_key= (in_keys=).", out)
            reward = reward if reward.is_floating_point() else reward.float()
            out.set(out_key, reward - fit(penalty, reward, self.kl_key, reward_key))
            if reward_key in self.raw_keys:
                out.set(self.raw_keys[reward_key], reward)
        if self.auto_update and all(root.get(key, None) is not None for key in self.measured_keys):
            self._measure(kl, root)

    def update(self, tensordict: TensorDictBase) -> None:
        """Show the controller a batch that was adjusted before: steps with their ``"next"``, or rows.

        Steps that a collector padded (``("collector", "mask")``) don't count.

        Raises:
            KeyError: the batch has no divergence.
            ValueError: the mean is not finite.
        """
        step = tensordict.get("next", None)
        sources = (tensordict,) if step is None else (step, tensordict)
        kl = required(type(self).__name__, self.kl_key, "Update from a batch after it was adjusted.", *sources)
        self._measure(kl, tensordict)

    def _measure(self, kl: Tensor, root: TensorDictBase) -> None:
        """The mean over a batch, ``[*B, ...]``, of the sums over what lies beyond it."""
        batch_dims = root.batch_dims
        total = kl.detach().flatten(batch_dims).sum(-1) if kl.ndim > batch_dims else kl.detach()
        real = root.get(("collector", "mask"), None)
        total = total if real is None else total[real.reshape(total.shape)]
        if not total.numel():
            return
        mean = total.mean()
        if not mean.isfinite():
            raise ValueError(
                f"The controller cannot follow a mean divergence of {float(mean)}: in "
                f"{int((~total.isfinite()).sum())} of {total.numel()} measurements one model cannot do what the other "
                "did (a forbidden or filtered token, an action out of bounds), or the policy has come to NaN."
            )
        self.controller.update(mean, total.numel())

    def _on_last(self, kl: Tensor, root: TensorDictBase) -> Tensor:
        """The sum over the row at the last token that the agent wrote, ``[*B, T]``."""
        written = required(type(self).__name__, self.mask_key or (), "It says which tokens the agent wrote.", root)
        if written.dtype != torch.bool:
            raise TypeError(f"mask_key={self.mask_key!r} must be bool, got {written.dtype}: convert it with .bool().")
        last = written & (written.cumsum(-1) == written.sum(-1, keepdim=True))
        return torch.where(last, kl.sum(-1, keepdim=True), 0)

    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        self._refuse_twice(observation_spec.keys(True, True))
        specs = self.parent.full_reward_spec
        added = {}
        for reward, out in zip(self.reward_keys, self.adjusted_keys, strict=True):
            if reward not in specs.keys(True, True):
                raise KeyError(
                    f"The environment has no reward {reward!r}, it has {list(specs.keys(True, True))}: name it with "
                    "reward_key= (in_keys=)."
                )
            if reward in self.raw_keys:
                floating = specs[reward].dtype.is_floating_point
                added[self.raw_keys[reward]] = specs[reward].clone() if floating else _unbounded(specs[reward])
            else:
                added[out] = _unbounded(specs[reward])
        return added

    def transform_reward_spec(self, reward_spec: TensorSpec) -> TensorSpec:
        """A reward that is written over has no bounds any more."""
        for reward in self.raw_keys:
            set_spec(reward_spec, reward, _unbounded(reward_spec[reward]))
        return reward_spec


def fit(penalty: Tensor, reward: Tensor, kl_key: NestedKey, reward_key: NestedKey) -> Tensor:
    """The penalty in the reward's shape; dimensions beyond the reward's are summed.

    Raises:
        ValueError: the shapes have nothing to do with each other.
    """
    penalty = penalty.to(reward.dtype)
    if penalty.shape == reward.shape:
        return penalty
    core = reward.shape[:-1] if reward.shape and reward.shape[-1] == 1 else reward.shape
    if penalty.shape[: len(core)] != core:
        raise ValueError(
            f"The divergence {kl_key!r} of shape {tuple(penalty.shape)} does not fit the reward {reward_key!r} of "
            f"shape {tuple(reward.shape)}: one value an action, or one a token. For one value a row of tokens use "
            "placement='last'."
        )
    if penalty.ndim > len(core):
        penalty = penalty.flatten(len(core)).sum(-1)
    return penalty.reshape(reward.shape)


def _unbounded(spec: TensorSpec) -> TensorSpec:
    dtype = spec.dtype if spec.dtype.is_floating_point else torch.float32
    return Unbounded(spec.shape, dtype=dtype, device=spec.device)


def _raw_keys(rewards: list[NestedKey], name: str) -> list[NestedKey]:
    """``"raw_reward"`` beside the reward; where that were one key for several, each behind its own name."""
    keys = [sibling(key, name) for key in rewards]
    if len(set(keys)) == len(keys):
        return keys
    return [sibling(key, f"raw_{last_name(key)}") for key in rewards]
