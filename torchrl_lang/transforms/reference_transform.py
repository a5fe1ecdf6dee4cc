"""The base of transforms with a frozen model: it moves with them, and a checkpoint stores its fingerprint."""

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

    Its ``state_dict`` has the fingerprint of the reference's weights and, with ``embed_weights``, the weights;
    ``load_state_dict`` raises where the fingerprints differ.

    Every call, every reset of an environment and every ``state_dict()`` checks that weights which the reference shares
    with the policy are unchanged. A compiled call does not check.
    """

    def __init__(
        self, out_keys: Sequence[NestedKey], reference: Reference | None, *, embed_weights: bool = False
    ) -> None:
        super().__init__(out_keys)
        self.reference: Any = reference
        self.embed_weights = embed_weights

    def _acted_keys(self) -> list[NestedKey]:
        return [] if self.reference is None else [*self.reference.in_keys, *self.reference.action_keys.action]

    def _action_keys(self) -> list[NestedKey]:
        return [] if self.reference is None else list(self.reference.action_keys.action)

    @property
    def _frozen(self) -> FrozenActor | None:
        held = None if self.reference is None else self.reference.frozen
        return held if isinstance(held, FrozenActor) else None

    def check_reference(self) -> None:
        """Raise where weights that the reference shares with the policy have changed."""
        if self._frozen is not None:
            self._frozen.check_unchanged()

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self.check_reference()  # a compiled step does not
        return super()._reset(tensordict, tensordict_reset)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ReferenceTransform:
        if self._frozen is not None:
            self._frozen.apply_to_owned(fn)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._frozen is None:
            return
        self.check_reference()
        destination[prefix + _FINGERPRINT] = self._frozen.fingerprint
        if self.embed_weights:
            destination.update({prefix + _WEIGHTS + name: value for name, value in self._frozen.state().items()})

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
            return  # the keys of a reference in the checkpoint remain unexpected
        start = prefix + _WEIGHTS
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith((prefix + _FINGERPRINT, start))]
        saved = state_dict.get(prefix + _FINGERPRINT)
        if saved is None:
            missing_keys.append(prefix + _FINGERPRINT)
            return
        weights = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
        if weights and not torch.equal(saved.cpu(), fingerprint(sorted(weights.items()))):
            error_msgs.append("The weights of the reference in the checkpoint are not those that were saved with it.")
            return
        if weights:
            frozen.load_state(weights)
        if not torch.equal(saved.cpu(), frozen.fingerprint):
            error_msgs.append(
                "The checkpoint was made with another reference model than this transform holds, or in another dtype: "
                "build it from the weights that the first run started from, converted as in that run (transform.to), "
                "or save with embed_weights=True to restore them."
            )
