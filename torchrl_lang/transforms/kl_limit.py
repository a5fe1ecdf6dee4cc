"""A hard limit on the divergence of an episode from the reference."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded

from torchrl_lang._checks import positive
from torchrl_lang.schema import DONE, TRUNCATED
from torchrl_lang.transforms.base import ActionTransform, required
from torchrl_lang.transforms.keys import KL, key_list, sibling
from torchrl_lang.transforms.reward_adjustment import match_reward

__all__ = ["KLLimitTransform"]

EPISODE_KL = "episode_kl"
WITHIN_LIMIT = "within_kl_limit"


class KLLimitTransform(ActionTransform):
    """Truncates episodes, or masks tokens of rows, whose summed divergence passes a limit.

    In an environment it sums the divergence over the episode into ``episode_kl`` and truncates the episode at the step
    at which the sum passes ``limit``. On whole rows it writes a mask for a loss's ``loss_mask_key``: False from the
    first token at which the sum passes the limit, even if later tokens bring it down again. A NaN sum has passed.

    Args:
        limit: in nats, above zero.
        kl_key: the divergence, from :class:`KLDivergenceTransform`; use one that is never negative (k3 or exact), or
            k1, whose sum is the log-ratio of the episode.
        mask_out_key: the mask of rows, bool ``[*B, T]``.
        done_key: the ``done`` to set, default that of the divergence's group or else the environment's. ``episode_kl``
            and ``truncated`` are written beside it. With a ``done`` for each agent the divergence of each counts,
            with one for all their sum.

    Raises:
        TypeError: the limit is no number.
        ValueError: the limit is not positive; on calls, the data are steps of a batch, whose episodes are over, or the
            divergence is not one value a token (``per="sequence"``).
        KeyError: in an environment, there is no such ``done``.
    """

    def __init__(
        self,
        limit: float,
        *,
        kl_key: NestedKey = KL,
        mask_out_key: NestedKey = WITHIN_LIMIT,
        done_key: NestedKey | None = None,
    ) -> None:
        positive("limit, in nats,", limit)
        kl_key = key_list(kl_key)[0]
        candidates = list(dict.fromkeys([sibling(kl_key, DONE), DONE])) if done_key is None else key_list(done_key)
        super().__init__([sibling(candidates[0], EPISODE_KL)])
        self.limit = limit
        self.kl_key = kl_key
        self.mask_out_key = mask_out_key
        self.done_key = candidates[0]  # in an environment, the first that it has
        self._candidates = candidates

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the mask of whole rows."""
        if tensordict.get("next", None) is not None:
            raise ValueError(
                "A limit truncates episodes while they are played, and these steps have been played: put the transform "
                "into the environment, or give it whole rows."
            )
        kl = required(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", tensordict)
        if kl.ndim != tensordict.batch_dims + 1 or kl.shape[-1] == 1:
            raise ValueError(
                f"A limit on rows needs one divergence a token, [*B, T], and {self.kl_key!r} of shape "
                f"{tuple(kl.shape)} has one a row, for a batch of {tuple(tensordict.batch_size)}: take per='token'."
            )
        return tensordict.copy().set(self.mask_out_key, self._passed(kl.cumsum(-1)).cumsum(-1) == 0)

    def _passed(self, total: Tensor) -> Tensor:
        return ~(total <= self.limit)  # also where it is NaN

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        kl = required(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", out)
        [total_key], truncated_key = self.out_keys, sibling(self.done_key, TRUNCATED)
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
            raise KeyError(
                f"{type(self).__name__} found none of {self._candidates} among {list(dones.keys(True, True))}: name "
                "the one to set, done_key=."
            )
        self.done_key = found[0]
        self.out_keys = [sibling(self.done_key, EPISODE_KL)]
        done, truncated_key = dones[self.done_key], sibling(self.done_key, TRUNCATED)
        if truncated_key not in dones.keys(True, True):
            dones[truncated_key] = Categorical(2, done.shape, device=done.device, dtype=done.dtype)
        return {self.out_keys[0]: Unbounded(done.shape, device=done.device)}
