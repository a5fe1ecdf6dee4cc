"""Action values with their own last layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_lang.modules.action_values import ActionValueHead, LastLayer
from torchrl_lang.modules.stacked_heads import HeadKind

__all__ = ["QValueHead"]


class QValueHead(ActionValueHead):
    """Action values of all next tokens from several heads in one module: ``hidden [*N, H] -> [*N, n_q, V]``.

    The two kinds are those of the ILQL paper (arXiv 2206.11871). Parameters, for ``n_q`` heads: ``in_weight``
    ``[n_q, 2H, H]``, ``in_bias`` ``[n_q, 2H]``, ``out_weight`` ``[n_q, V, 2H]``, ``out_bias`` ``[n_q, V]``. The
    ``"residual"`` kind has inner width ``4H`` instead of ``2H``, ``H`` in the last layer, and further parameters
    ``norm1_*``, ``mid_*``, ``norm2_*``. For a large vocabulary a :class:`~torchrl_lang.modules.TiedQValueHead` is much
    cheaper. Over a model in half precision heads stay in float32: states are cast to the dtype of the weights.

    Args:
        width: ``H``.
        vocab_size: ``V``.
        n_heads: ``n_q``; ILQL uses the minimum of two.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: dropout probability of the ``"residual"`` kind.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import QValueHead
        >>> head = QValueHead(8, vocab_size=5)
        >>> hidden, action = torch.randn(3, 8), torch.tensor([4, 0, 2])
        >>> head(hidden).shape, head.taken(hidden, action).shape
        (torch.Size([3, 2, 5]), torch.Size([3, 2]))
    """

    def __init__(
        self, width: int, vocab_size: int, *, n_heads: int = 2, kind: HeadKind = "mlp", dropout: float = 0.0
    ) -> None:
        super().__init__(width, n_heads, vocab_size, kind, dropout)

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.out_weight.shape[1]

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return super().config() | {"vocab_size": self.vocab_size, "n_heads": self.out_weight.shape[0]}

    def last_layer(self, hidden: Tensor) -> LastLayer:
        """The last layer and its input, for states ``[N, H]``."""
        return LastLayer(self.features(hidden), self.out_weight, self.out_bias)
