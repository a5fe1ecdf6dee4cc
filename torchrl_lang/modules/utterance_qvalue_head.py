"""Action values of whole utterances."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_lang.modules.stacked_heads import HeadKind, StackedHeads

__all__ = ["UtteranceQValueHead"]


class UtteranceQValueHead(StackedHeads):
    """Values of one utterance in its state from several heads in one module: ``hidden [*N, H] -> [*N, n_q]``.

    The hidden state has read the utterance, so the output is a number and not one for each next token as a
    :class:`~torchrl_lang.modules.QValueHead`'s, whose kinds, initialization and parameters these are with ``V = 1``.

    Args:
        width: ``H``.
        n_heads: ``n_q``; the minimum of two is used.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: dropout probability of the ``"residual"`` kind.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import UtteranceQValueHead
        >>> UtteranceQValueHead(8)(torch.randn(3, 8)).shape
        torch.Size([3, 2])
    """

    def __init__(self, width: int, *, n_heads: int = 2, kind: HeadKind = "mlp", dropout: float = 0.0) -> None:
        super().__init__(width, n_heads, 1, kind, dropout)

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return super().config() | {"n_heads": self.out_weight.shape[0]}

    def forward(self, hidden: Tensor) -> Tensor:
        """Value of each utterance, ``[*N, H] -> [*N, n_q]``."""
        values = self.outputs(hidden.reshape(-1, hidden.shape[-1])).squeeze(-1)  # [n_q, N]
        return values.mT.reshape(*hidden.shape[:-1], values.shape[0])
