"""A hard limit on how far an episode may drift from the reference."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded

from torchrl_lang.modules.controllers.numbers import above_zero
from torchrl_lang.schema import DONE, TRUNCATED
from torchrl_lang.transforms.base import ActionTransform, required, set_spec
from torchrl_lang.transforms.keys import KL, key_list, sibling
from torchrl_lang.transforms.reward_adjustment import fit

__all__ = ["KLLimitTransform"]

EPISODE_KL = "episode_kl"
WITHIN_LIMIT = "within_kl_limit"


class KLLimitTransform(ActionTransform):
    """Stops what has drifted too far.

    In an environment it sums the divergence over the episode into ``episode_kl`` and truncates the episode at the step
    at which the sum passes ``limit``. On whole rows, where nothing can be stopped any more, it writes a mask for a
    loss's ``loss_mask_key``: False from the first token at which the sum passes the limit, though later ones may bring
    it down again. A sum that is NaN has passed.

    Args:
        limit: in nats, above zero.
        kl_key: the divergence, from :class:`KLDivergenceTransform`; for a limit use one that is never negative (k3 or
            exact), or k1, whose sum is the log-ratio of the episode.
        out_key: the running sum, the shape of ``done``; default ``"episode_kl"`` beside it.
        mask_out_key: the mask of rows, bool ``[*B, T]``.
        done_key: what ends an episode; default the environment's, in the divergence's group if there is one. With a
            ``done`` for each agent each one's own divergence counts, with one for all their sum.
        truncated_key: what says that a limit did, default ``"truncated"`` beside ``done_key``; declared where the
            environment has none.

    Raises:
        TypeError: the limit is no number.
        ValueError: the limit is not positive; on calls, the data are steps of a batch, whose episodes are over, or the
            divergence is not one value a token (``per="sequence"``); in an environment, several groups have a ``done``
            and none of them the divergence.
    """

    def __init__(
        self,
        limit: float,
        *,
        kl_key: NestedKey = KL,
        out_key: NestedKey | None = None,
        mask_out_key: NestedKey = WITHIN_LIMIT,
        done_key: NestedKey | None = None,
        truncated_key: NestedKey | None = None,
    ) -> None:
        super().__init__(key_list(EPISODE_KL if out_key is None else out_key))
        self.limit = above_zero(limit, "limit, in nats,")
        self.kl_key = key_list(kl_key)[0]
        self.mask_out_key = mask_out_key
        self.out_key, self.done_key, self.truncated_key = (
            None if key is None else key_list(key)[0] for key in (out_key, done_key, truncated_key)
        )

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
        return ~(total <= self.limit)  # NaN is within no limit

    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        kl = required(type(self).__name__, self.kl_key, "Put KLDivergenceTransform before it.", out)
        keys = self._keys()
        so_far = root.get(keys.total)
        total = so_far + fit(kl, so_far, self.kl_key, keys.total)
        passed = self._passed(total)
        truncated = out.get(keys.truncated, None)
        out.set(keys.total, total)
        out.set(keys.truncated, passed if truncated is None else truncated | passed)
        out.set(keys.done, out.get(keys.done) | passed)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        keys = self._keys()
        if tensordict_reset.get(keys.truncated, None) is None:
            tensordict_reset.set(keys.truncated, tensordict_reset.get(keys.done).clone())
        return tensordict_reset

    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        keys = self._keys()
        done = self.parent.full_done_spec[keys.done]
        return {keys.total: Unbounded(done.shape, device=done.device)}

    def transform_done_spec(self, done_spec: TensorSpec) -> TensorSpec:
        """Declare ``truncated`` where the environment has none."""
        keys = self._keys()
        if keys.truncated not in done_spec.keys(True, True):
            done = done_spec[keys.done]
            set_spec(done_spec, keys.truncated, Categorical(2, done.shape, device=done.device, dtype=done.dtype))
        return done_spec

    def _keys(self) -> _Keys:
        """Where everything stands in this environment."""
        if self.__dict__["_found"] is None:
            done = self._find_done() if self.done_key is None else self.done_key
            total = sibling(done, EPISODE_KL) if self.out_key is None else self.out_key
            truncated = sibling(done, TRUNCATED) if self.truncated_key is None else self.truncated_key
            self.out_keys = [total]
            self.__dict__["_found"] = _Keys(total, done, truncated)
        return self.__dict__["_found"]

    def _find_done(self) -> NestedKey:
        """The ``done`` of the divergence's group, or that of the whole environment, or the only one."""
        present = [key for key in key_list(list(self.parent.done_keys)) if sibling(key, DONE) == key]
        for key in (sibling(self.kl_key, DONE), DONE):
            if key in present:
                return key
        if len(present) != 1:
            raise ValueError(
                f"{type(self).__name__} cannot tell which of {present} ends an episode: name it, done_key=."
            )
        return present[0]


class _Keys(NamedTuple):
    total: NestedKey
    done: NestedKey
    truncated: NestedKey
