"""The reward minus a multiple of the divergence, and a limit of the divergence of an episode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded

from torchrl_lang._checks import check_options, checked
from torchrl_lang.modules.controllers import KLController, NumberKLController, one_number
from torchrl_lang.schema import DONE, RAW_REWARD, REWARD, TRUNCATED, find_entry
from torchrl_lang.transforms.base import KL, ActionTransform, key_list, last_name, sibling

_TWICE = (
    "and the penalty would count twice: use the transform in one place, make rows with rows_from_rollout(..., "
    "reward_key=None), or give the RewardAdjustmentTransform of a second reference a raw_key= of its own."
)
EPISODE_KL = "episode_kl"
WITHIN_LIMIT = "within_kl_limit"


class RewardAdjustmentTransform(ActionTransform):
    """Replaces the reward by ``R - coef * KL`` and keeps the raw one.

    The divergence is brought to the reward's shape: one value an action becomes ``[*B, 1]``, tokens of an utterance are
    summed into its reward, tokens of a row are subtracted from the reward of each token.

    In an environment the raw reward is an observation; TorchRL's ``RewardSum`` of it goes before this transform.

    Args:
        coef: a number, or a :class:`KLController` that changes it.
        reward_key: the reward; several keys are adjusted by the same divergence.
        kl_key: the divergence, from :class:`KLDivergenceTransform`.
        out_key: the adjusted reward, as many keys as there are rewards; default in place of the raw one.
        raw_key: the raw reward when it is replaced, as many keys as there are rewards; default ``"raw_reward"`` beside
            it, ``"raw_"`` and its name where there are several. Rows made from an environment's steps keep the entry if
            its name ends in ``"raw_reward"``, so that a second penalty is refused.
        placement: ``"token"`` subtracts each token's divergence from its own reward; ``"last"`` subtracts the sum over
            the row from the reward of the last token that the agent wrote.
        mask_key: for ``"last"``: bool ``[*B, T]``, the tokens that the agent wrote.

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

    @checked
    def __init__(
        self,
        coef: float | Tensor | KLController = 1.0,
        *,
        reward_key: NestedKey | Sequence[NestedKey] = REWARD,
        kl_key: NestedKey = KL,
        out_key: NestedKey | Sequence[NestedKey] | None = None,
        raw_key: NestedKey | Sequence[NestedKey] | None = None,
        placement: Literal["token", "last"] = "token",
        mask_key: NestedKey | None = None,
    ) -> None:
        if placement == "last" and mask_key is None:
            raise ValueError("placement='last' is for whole rows of tokens: it needs their mask, mask_key=.")
        rewards = key_list(reward_key)
        out = rewards if out_key is None else key_list(out_key)
        raw = _raw_keys(rewards) if raw_key is None else key_list(raw_key)
        if not len(rewards) == len(out) == len(raw):
            found = f"got {len(rewards)} rewards {rewards}, adjusted {out} and raw {raw}"
            raise ValueError(f"The numbers of in_keys and out_keys (reward_key, out_key and raw_key) differ: {found}.")
        self._keys = list(zip(rewards, out, raw, strict=True))
        self.kl_key = key_list(kl_key)[0]
        replaced = [raw for reward, adjusted, raw in self._keys if adjusted == reward]
        read = [*rewards, self.kl_key, *([mask_key] if placement == "last" and mask_key is not None else [])]
        super().__init__(read, [*out, *replaced])
        self.placement, self.mask_key = placement, mask_key
        self.controller = coef if isinstance(coef, KLController) else NumberKLController(coef)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Adjust the rewards of a batch; the batch given stays as it was.

        Raises:
            ValueError: the batch already has a raw reward, so it was adjusted before.
        """
        step = tensordict.get("next", None)
        self._refuse_twice((tensordict if step is None else step).keys(True, True))
        return super().forward(tensordict)

    def _refuse_twice(self, present: Collection[NestedKey]) -> None:
        for reward, _, raw in self._keys:
            if raw in present:
                raise ValueError(f"The reward {reward!r} was adjusted before (it was {raw!r}), {_TWICE}")

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        name = type(self).__name__
        kl = find_entry(name, self.kl_key, "Put KLDivergenceTransform before it.", out, root)
        kl_here = self._on_last(kl, root) if self.placement == "last" else kl
        # The largest number in place of infinity, since a coefficient of zero times infinity is NaN.
        penalty = self.controller(kl.dtype) * kl_here.clamp_max(torch.finfo(kl.dtype).max)
        for reward_key, out_key, raw_key in self._keys:
            reward = find_entry(name, reward_key, "Name the reward with in_keys= or reward_key=.", out)
            reward = reward if reward.is_floating_point() else reward.float()
            out.set(out_key, reward - match_reward(penalty, reward, self.kl_key, reward_key))
            if out_key == reward_key:
                out.set(raw_key, reward)

    def update(self, tensordict: TensorDictBase) -> None:
        """Update the controller with a batch that was adjusted before: steps with their ``"next"``, or rows.

        It gets the mean divergence: of a sequence where the data are rows or utterances, of an action where they are
        steps. Rows in which the agent wrote nothing and steps that a collector padded (``("collector", "mask")``) are
        left out.

        Raises:
            KeyError: the batch has no divergence.
            ValueError: the mean is not finite.
        """
        step = tensordict.get("next", None)
        sources = (tensordict,) if step is None else (step, tensordict)
        kl = find_entry(type(self).__name__, self.kl_key, "Update from a batch after it was adjusted.", *sources)
        batch_dims = tensordict.batch_dims
        total = kl.detach().flatten(batch_dims).sum(-1) if kl.ndim > batch_dims else kl.detach()
        real = tensordict.get(("collector", "mask"), None)
        if real is None and self.mask_key is not None and (written := tensordict.get(self.mask_key, None)) is not None:
            real = written.flatten(batch_dims).any(-1)
        total = total if real is None else total[real.reshape(total.shape)]
        if not total.numel():
            return
        if infinite := int((~total.isfinite()).sum()):
            raise ValueError(f"{infinite} of {total.numel()} divergences are not finite, as of impossible actions.")
        self.controller.update(total.mean(), total.numel())

    def _on_last(self, kl: Tensor, root: TensorDictBase) -> Tensor:
        """The sum over the row at the last token that the agent wrote, ``[*B, T]``."""
        written = find_entry(type(self).__name__, self.mask_key or (), "It is the mask of the agent's tokens.", root)
        last = written & (written.cumsum(-1) == written.sum(-1, keepdim=True))
        return torch.where(last, kl.sum(-1, keepdim=True), 0)

    def _new_specs(self, specs: Composite) -> dict[NestedKey, TensorSpec]:
        self._refuse_twice(specs["full_observation_spec"].keys(True, True))
        rewards, added = specs["full_reward_spec"], {}
        for reward, out, raw in self._keys:
            advice = "Give in_keys=/reward_key= (ChatEnv has none: use GameChatEnv or a transform that adds one)."
            spec = find_entry(type(self).__name__, reward, advice, rewards)
            dtype = spec.dtype if spec.dtype.is_floating_point else torch.float32
            unbounded = Unbounded(spec.shape, dtype=dtype, device=spec.device)
            if out == reward:
                added[raw] = spec.clone() if spec.dtype.is_floating_point else unbounded
                rewards[reward] = unbounded.clone()
            else:
                added[out] = unbounded
        return added


def match_reward(penalty: Tensor, reward: Tensor, kl_key: NestedKey, reward_key: NestedKey) -> Tensor:
    """The penalty in the reward's shape; dimensions beyond the reward's are summed.

    Raises:
        ValueError: the leading dimensions differ.
    """
    penalty = penalty.to(reward.dtype)
    if penalty.shape == reward.shape:
        return penalty
    core = reward.shape[:-1] if reward.shape and reward.shape[-1] == 1 else reward.shape
    if penalty.shape[: len(core)] != core:
        shapes = f"{kl_key!r} {tuple(penalty.shape)} does not fit {reward_key!r} {tuple(reward.shape)}"
        raise ValueError(f"{shapes}; for one value a row of tokens use placement='last'.")
    if penalty.ndim > len(core):
        penalty = penalty.flatten(len(core)).sum(-1)
    return penalty.reshape(reward.shape)


def _raw_keys(rewards: list[NestedKey]) -> list[NestedKey]:
    """``"raw_reward"`` beside each reward; ``"raw_"`` and its name where several are in one group."""
    keys = [sibling(key, RAW_REWARD) for key in rewards]
    if len(set(keys)) == len(keys):
        return keys
    return [sibling(key, f"raw_{last_name(key)}") for key in rewards]


class KLLimitTransform(ActionTransform):
    """Truncates episodes, or masks tokens of rows, whose summed divergence passes a limit.

    In an environment it sums the divergence over the episode into ``episode_kl`` and truncates the episode at the step
    at which the sum passes ``limit``. On whole rows it writes ``within_kl_limit``, bool ``[*B, T]``, a mask for a
    loss's ``loss_mask_key``: False from the first token at which the sum passes the limit, even if later tokens bring
    it down again. A NaN sum has passed.

    Args:
        limit: in nats, above zero.
        kl_key: the divergence, from :class:`KLDivergenceTransform`; use one that is never negative (k3 or exact), or
            k1, whose sum is the log-ratio of the episode.
        done_key: the ``done`` to set, default that of the divergence's group or else the environment's. ``episode_kl``
            and ``truncated`` are written beside it. With a ``done`` for each agent the divergence of each counts,
            with one for all their sum.

    Raises:
        TypeError: the limit is no number.
        ValueError: the limit is not positive; on calls, the data are steps of a batch, whose episodes are over, or the
            divergence is not one value a token (``per="sequence"``).
        KeyError: in an environment, there is no such ``done``.
    """

    def __init__(self, limit: float, *, kl_key: NestedKey = KL, done_key: NestedKey | None = None) -> None:
        check_options(limit=(one_number("limit", limit), "(0, inf)"))
        kl_key = key_list(kl_key)[0]
        candidates = list(dict.fromkeys([sibling(kl_key, DONE), DONE])) if done_key is None else key_list(done_key)
        super().__init__([], [])
        self.limit, self.kl_key = limit, kl_key
        self._set_done(candidates[0])  # in an environment, the first that it has
        self._candidates = candidates

    def _set_done(self, key: NestedKey) -> None:
        self.done_key = key
        self.in_keys = [self.kl_key, key]
        self.out_keys = [sibling(key, EPISODE_KL), key, sibling(key, TRUNCATED)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the mask of whole rows."""
        if tensordict.get("next", None) is not None:
            raise ValueError("These steps have been played: put the limit into the environment, or give it whole rows.")
        kl = find_entry(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", tensordict)
        if kl.ndim != tensordict.batch_dims + 1 or kl.shape[-1] == 1:
            raise ValueError(f"A limit on rows needs {self.kl_key!r} as [*B, T], per='token', got {tuple(kl.shape)}.")
        return tensordict.copy().set(WITHIN_LIMIT, self._passed(kl.cumsum(-1)).cumsum(-1) == 0)

    def _passed(self, total: Tensor) -> Tensor:
        return ~(total <= self.limit)  # also where it is NaN

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        kl = find_entry(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", out)
        total_key, _, truncated_key = self.out_keys
        before = root.get(total_key)
        total = before + match_reward(kl, before, self.kl_key, total_key)
        passed = self._passed(total)
        truncated = out.get(truncated_key, None)
        out.set(total_key, total)
        out.set(truncated_key, passed if truncated is None else truncated | passed)
        out.set(self.done_key, out.get(self.done_key) | passed)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        truncated_key = sibling(self.done_key, TRUNCATED)
        if tensordict_reset.get(truncated_key, None) is None:
            tensordict_reset.set(truncated_key, tensordict_reset.get(self.done_key).clone())
        return tensordict_reset

    def _new_specs(self, specs: Composite) -> dict[NestedKey, TensorSpec]:
        dones = specs["full_done_spec"]
        found = [key for key in self._candidates if key in dones.keys(True, True)]
        if not found:
            raise KeyError(f"There is none of {self._candidates} in {list(dones.keys(True, True))}: give done_key=.")
        self._set_done(found[0])
        total_key, _, truncated_key = self.out_keys
        done = dones[self.done_key]
        if truncated_key not in dones.keys(True, True):
            dones[truncated_key] = Categorical(2, done.shape, device=done.device, dtype=done.dtype)
        return {total_key: Unbounded(done.shape, device=done.device)}
