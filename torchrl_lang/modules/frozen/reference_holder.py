"""The base of transforms and losses with a frozen reference: it moves with them, and their state fingerprints it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, fingerprint

_FINGERPRINT = "reference_fingerprint"
_WEIGHTS = "reference_weights."


class ReferenceHolder(nn.Module):
    """A module that holds a reference, outside of its parameters. Abstract.

    Its ``state_dict`` has the fingerprint of the reference's weights and, with ``embed_weights``, the weights, which
    loading restores. ``load_state_dict`` raises a RuntimeError where the fingerprints differ, ``state_dict`` where
    weights that the reference shares with the policy have changed.
    """

    reference: Any = None
    embed_weights: bool = False
    # What the present load_state_dict found: fingerprint, weights, and the list of its errors.
    _found: tuple[Tensor, dict[str, Tensor], list[str]] | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """As of the bases of losses and transforms, which are not typed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_post_hook(_compare)

    @property
    def _frozen(self) -> FrozenActor | None:
        """The frozen model; None where there is none to move, to save or to fingerprint."""
        return self.reference

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Any:
        if self._frozen is not None:
            self._frozen.apply_to_owned(fn)
        return super()._apply(fn, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._frozen is None:
            return
        self._frozen.check_unchanged()
        destination[prefix + _FINGERPRINT] = self._frozen.fingerprint
        if self.embed_weights:
            destination.update({prefix + _WEIGHTS + name: value for name, value in self._frozen.state().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._frozen is None:
            return  # the keys of a reference in the state remain unexpected
        self._found = None
        _, _, missing_keys, unexpected_keys, error_msgs = args
        start = prefix + _WEIGHTS
        unexpected_keys[:] = [key for key in unexpected_keys if not key.startswith((prefix + _FINGERPRINT, start))]
        saved = state_dict.get(prefix + _FINGERPRINT)
        if saved is None:
            missing_keys.append(prefix + _FINGERPRINT)
            return
        weights = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
        self._found = saved.cpu(), weights, error_msgs


def _compare(module: ReferenceHolder, _: object) -> None:
    """Restore or compare the reference, once the networks that may share weights with it have been loaded."""
    found, module._found = module._found, None
    if found is None or module._frozen is None:
        return
    saved, weights, errors = found
    if not weights:
        if not module._frozen.accept(saved):
            differs = f"{_short(saved)} is not this {type(module).__name__}'s {_short(module._frozen.fingerprint)}"
            advice = "build it from the first run's weights and dtype, or save with embed_weights=True"
            errors.append(f"The state was made with another reference model: {differs}; {advice}.")
    elif not torch.equal(saved, fingerprint(sorted(weights.items()))):
        errors.append("The weights of the reference in the state are not those that were saved with it.")
    else:
        try:
            module._frozen.load_state(weights)
        except ValueError as error:
            errors.append(str(error))


def _short(found: Tensor) -> str:
    return f"fingerprint {bytes(found.tolist()).hex()[:8]}"
