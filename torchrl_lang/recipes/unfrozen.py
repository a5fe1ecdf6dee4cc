"""What a checkpoint holds of a loss: what moves; of what is frozen it knows only whether it is the same."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.modules.frozen.fingerprint import fingerprint

__all__ = ["Unfrozen"]

_FINGERPRINT = "frozen_fingerprint"


class Unfrozen:
    """The state of a module without its frozen parameters, in whose place a fingerprint stands.

    Whoever resumes makes the frozen ones anew, from where the first run took them: layers below those that train, the
    weights beside adapters. Buffers are kept, a loss's target parameters among them.

    Args:
        module: of which parameters that require no gradient are left out.

    Examples:
        >>> import torch
        >>> from torchrl_lang.recipes.unfrozen import Unfrozen
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
        >>> list(Unfrozen(net).state_dict())
        ['1.weight', '1.bias', 'frozen_fingerprint']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """What trains, the buffers and, where anything is frozen, its fingerprint, uint8 ``[32]``."""
        frozen = self._frozen()
        kept = {name: value for name, value in self.module.state_dict().items() if name not in frozen}
        return kept | ({_FINGERPRINT: self._fingerprint} if frozen else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; what is frozen stays as it is.

        Raises:
            ValueError: the state was made beside other frozen weights. Then nothing has changed.
            RuntimeError: a name is missing, or one too many.
        """
        frozen, state = self._frozen(), dict(state_dict)
        made_beside = state.pop(_FINGERPRINT, None)
        if frozen and (made_beside is None or not torch.equal(made_beside.cpu(), self._fingerprint)):
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
        """They are frozen, so once is enough: it takes a second for each gigabyte."""
        return fingerprint(self._frozen().items())
