"""The base of transforms with a frozen model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from tensordict import NestedKey, TensorDictBase

from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.frozen.reference_holder import ReferenceHolder
from torchrl_lang.transforms.base import ActionTransform
from torchrl_lang.transforms.references import Reference

__all__ = ["ReferenceTransform"]


class ReferenceTransform(ReferenceHolder, ActionTransform):
    """A transform that holds a reference, see :class:`ReferenceHolder`. Abstract.

    Every call, every reset of an environment and every ``state_dict()`` checks that weights which the reference shares
    with the policy are unchanged. A compiled call does not check.
    """

    def __init__(
        self, out_keys: Sequence[NestedKey], reference: Reference | None, *, embed_weights: bool = False
    ) -> None:
        super().__init__(out_keys)
        if reference is not None and reference.state_keys:
            reference = copy.copy(reference)  # its state is that of this transform alone
            name = out_keys[0]
            reference.state_group = f"{name if isinstance(name, str) else '_'.join(name)}_state"
        self.reference = reference
        self.embed_weights = embed_weights

    def _acted_keys(self) -> list[NestedKey]:
        if self.reference is None:
            return []
        return [*self.reference.in_keys, *self.reference.state_keys, *self.reference.action_keys.action]

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
