"""A hard limit on how far an episode may drift from the reference."""

from __future__ import annotations

import math

from tensordict import NestedKey, TensorDictBase
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded

from torchrl_lang.schema import DONE, TRUNCATED
from torchrl_lang.transforms.layout import KL, key_list
from torchrl_lang.transforms.placement import ActionTransform, required, set_spec
from torchrl_lang.transforms.reward_adjustment import fit

__all__ = ["KLLimitTransform"]

EPISODE_KL = "episode_kl"
WITHIN_LIMIT = "within_kl_limit"


class KLLimitTransform(ActionTransform):
    """Stops what has drifted too far.

    In an environment it sums the divergence over the episode into ``episode_kl`` and truncates the episode at the step
    at which the sum passes ``limit``. On whole rows, where nothing can be stopped any more, it writes a mask for a
    loss's ``loss_mask_key``: True up to the last token at which the sum is within the limit.

    Args:
        limit: in nats, above zero.
        kl_key: the divergence, from :class:`KLDivergenceTransform`; for a limit use one that is never negative (k3 or
            exact), or k1, whose sum is the log-ratio of the episode.
        out_key: the running sum, the shape of ``done``.
        mask_out_key: the mask of rows, bool ``[*B, T]``.
        done_key: what ends an episode.
        truncated_key: what says that a limit did; declared where the environment has none.

    Raises:
        ValueError: the limit is not positive; on calls, the data are steps of a batch, whose episodes are over.
    """

    def __init__(
        self,
        limit: float,
        *,
        kl_key: NestedKey = KL,
        out_key: NestedKey = EPISODE_KL,
        mask_out_key: NestedKey = WITHIN_LIMIT,
        done_key: NestedKey = DONE,
        truncated_key: NestedKey = TRUNCATED,
    ) -> None:
        if not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"limit must be a finite number of nats above 0, got {limit}.")
        super().__init__(key_list(out_key))
        self.limit = limit
        self.kl_key = key_list(kl_key)[0]
        self.mask_out_key = mask_out_key
        self.done_key = key_list(done_key)[0]
        self.truncated_key = key_list(truncated_key)[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the mask of whole rows."""
        if tensordict.get("next", None) is not None:
            raise ValueError(
                "A limit truncates episodes while they are played, and these steps have been played: put the transform "
                "into the environment, or give it whole rows."
            )
        kl = required(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", tensordict)
        return tensordict.copy().set(self.mask_out_key, kl.cumsum(-1) <= self.limit)

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        kl = required(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", out)
        so_far = root.get(self.out_keys[0])
        total = so_far + fit(kl, so_far, self.kl_key, self.out_keys[0])
        passed = total > self.limit
        truncated = out.get(self.truncated_key, None)
        out.set(self.out_keys[0], total)
        out.set(self.truncated_key, passed if truncated is None else truncated | passed)
        out.set(self.done_key, out.get(self.done_key) | passed)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if tensordict_reset.get(self.truncated_key, None) is None:
            tensordict_reset.set(self.truncated_key, tensordict_reset.get(self.done_key).clone())
        return tensordict_reset

    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        done = self.parent.full_done_spec[self.done_key]
        return {self.out_keys[0]: Unbounded(done.shape, device=done.device)}

    def transform_done_spec(self, done_spec: TensorSpec) -> TensorSpec:
        """Declare ``truncated`` where the environment has none."""
        if self.truncated_key not in done_spec.keys(True, True):
            done = done_spec[self.done_key]
            set_spec(done_spec, self.truncated_key, Categorical(2, done.shape, device=done.device, dtype=done.dtype))
        return done_spec
