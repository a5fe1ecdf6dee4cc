"""What transforms with a frozen model have in common: it moves with them, and a checkpoint knows it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.modules.frozen.fingerprint import fingerprint
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.transforms.base import ActionTransform
from torchrl_lang.transforms.references import Reference

__all__ = ["ReferenceTransform"]

_FINGERPRINT = "reference_fingerprint"
_WEIGHTS = "reference_weights."


class ReferenceTransform(ActionTransform):
    """A transform that holds a reference, outside of its parameters. Abstract.

    Its ``state_dict`` has the fingerprint of the reference's weights, in the dtype that they have, and the weights
    where asked for; ``load_state_dict`` raises where the fingerprints differ.

    Whether weights that the reference shares with the policy have changed is looked at on every call, at each reset of
    an environment, and before a ``state_dict`` is made. A compiled call does not look.

    Args:
        out_keys: the entries that it writes.
        reference: what it holds; None for a transform that can do without.
        embed_weights: keep the weights of the reference in the ``state_dict``.
    """

    def __init__(
        self, out_keys: Sequence[NestedKey], reference: Reference | None, *, embed_weights: bool = False
    ) -> None:
        super().__init__(out_keys)
        self.reference = reference
        self.embed_weights = embed_weights

    @property
    def held(self) -> Reference:
        """The reference, where there must be one."""
        if self.reference is None:
            raise RuntimeError(f"{type(self).__name__} holds no reference.")
        return self.reference

    def _acted_keys(self) -> list[NestedKey]:
        return [] if self.reference is None else [*self.reference.in_keys, *self.reference.action_keys.action]

    def _action_keys(self) -> list[NestedKey]:
        return [] if self.reference is None else list(self.reference.action_keys.action)

    def check_reference(self) -> None:
        """Raise where weights that the reference shares with the policy have changed."""
        frozen = self._frozen
        if frozen is not None:
            frozen.check_unchanged()

    @property
    def _frozen(self) -> FrozenActor | None:
        return None if self.reference is None else self.reference.frozen

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ReferenceTransform:
        if self.reference is not None:
            self.reference.apply_to_owned(fn)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        frozen = self._frozen
        if frozen is None:
            return
        frozen.check_unchanged()
        destination[prefix + _FINGERPRINT] = frozen.fingerprint
        if self.embed_weights:
            destination.update({prefix + _WEIGHTS + name: value for name, value in frozen.state().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        frozen = self._frozen
        if frozen is None:
            return  # what a checkpoint says of a model stays among the unexpected keys
        ours = (prefix + _FINGERPRINT, prefix + _WEIGHTS)
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith(ours)]
        saved = state_dict.get(prefix + _FINGERPRINT)
        if saved is None:
            missing_keys.append(prefix + _FINGERPRINT)
            return
        start = len(prefix + _WEIGHTS)
        weights = {key[start:]: value for key, value in state_dict.items() if key.startswith(prefix + _WEIGHTS)}
        if weights:
            if not torch.equal(saved.cpu(), fingerprint(sorted(weights.items()))):
                error_msgs.append(
                    "The weights of the reference in the checkpoint are not those that were saved with it."
                )
                return
            frozen.load_state(weights)
        if not torch.equal(saved.cpu(), frozen.fingerprint):
            error_msgs.append(
                "The checkpoint was made with another reference model than this transform holds, or in another dtype: "
                "build it from the weights that the first run started from, converted as in that run (transform.to), "
                "or save with embed_weights=True to restore them."
            )

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # A compiled step does not look whether the reference is still what it was; few compile a reset.
        self.check_reference()
        return super()._reset(tensordict, tensordict_reset)
