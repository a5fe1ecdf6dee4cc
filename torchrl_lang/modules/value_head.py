"""State values."""

from __future__ import annotations

from torch import Tensor

from torchrl_lang.modules.stacked_heads import HeadKind, StackedHeads

__all__ = ["ValueHead"]


class ValueHead(StackedHeads):
    """State value, ``hidden [*N, H] -> [*N, 1]``.

    Kinds, initialization and parameters as in :class:`~torchrl_lang.modules.QValueHead` with ``V = 1``.

    Args:
        width: ``H``.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: dropout probability of the ``"residual"`` kind.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import ValueHead
        >>> ValueHead(8)(torch.randn(3, 8)).shape
        torch.Size([3, 1])
    """

    def __init__(self, width: int, *, kind: HeadKind = "mlp", dropout: float = 0.0) -> None:
        super().__init__(width, 1, 1, kind, dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Value of each state, ``[*N, H] -> [*N, 1]``."""
        return self.outputs(hidden.reshape(-1, hidden.shape[-1]))[0].unflatten(0, hidden.shape[:-1])
