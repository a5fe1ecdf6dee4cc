"""The checkpoint state of a module without its frozen parameters."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.modules.frozen.fingerprint import fingerprint

__all__ = ["TrainableState"]

_FINGERPRINT = "frozen_fingerprint"


class TrainableState:
    """The state of a module, with a fingerprint in place of its frozen parameters.

    A resumed run loads the frozen parameters from where the first call loaded them; the fingerprint is verified.
    Buffers are in the state, and so are a loss's target parameters.

    Args:
        module: parameters of it that require no gradient are left out.

    Examples:
        >>> import torch
        >>> from torchrl_lang.recipes.trainable_state import TrainableState
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
        >>> list(TrainableState(net).state_dict())
        ['1.weight', '1.bias', 'frozen_fingerprint']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Trainable parameters, buffers and, if anything is frozen, the fingerprint, uint8 ``[32]``."""
        frozen = self._frozen()
        kept = {name: value for name, value in self.module.state_dict().items() if name not in frozen}
        return kept | ({_FINGERPRINT: self._fingerprint} if frozen else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; frozen parameters stay as they are.

        Raises:
            ValueError: the state belongs to other frozen parameters. Nothing has been loaded then.
            RuntimeError: names of parameters are missing or unexpected.
        """
        frozen, state = self._frozen(), dict(state_dict)
        expected = state.pop(_FINGERPRINT, None)
        if frozen and (expected is None or not torch.equal(expected.cpu(), self._fingerprint)):
            raise ValueError(
                "it was made beside other frozen weights than those of this run: continue it from the model that it "
                "started from."
            )
        self.module.load_state_dict(frozen | state)

    def _frozen(self) -> dict[str, Tensor]:
        state = self.module.state_dict(keep_vars=True)
        return {
            name: value for name, value in state.items() if isinstance(value, nn.Parameter) and not value.requires_grad
        }

    @cached_property
    def _fingerprint(self) -> Tensor:
        """Computed once, because it takes a second per gigabyte and frozen parameters do not change."""
        return fingerprint(self._frozen().items())
