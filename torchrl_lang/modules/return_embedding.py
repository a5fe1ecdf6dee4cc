"""Embeddings of returns that a policy should reach, added to the embeddings of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang._checks import finite, one_of
from torchrl_lang.functional.returns import ReturnConditions, ReturnMode

__all__ = ["ReturnEmbedding"]


class ReturnEmbedding(nn.Module):
    """Adds ``w * x + b`` to the embedding of a token, ``x`` in ``[-1, 1]`` the scaled return that the token carries.

    This is the decision transformer's linear embedding of a return (arXiv 2106.01345), without a position of its own:
    a row keeps its length, and a cache of keys and values works as without returns. It begins at zero, so that a
    pretrained model starts unchanged.

    A token carries a return in its id: ``id + V * (i + 1)`` for a model with ``V`` embeddings, where ``i`` numbers
    ``n_bins`` equally spaced returns from ``low`` to ``high``. A return is rounded to the nearest of them, at most
    ``(high - low) / (n_bins - 1) / 2`` away. Ids below ``V`` carry none and are embedded as before.

    Args:
        width: ``H``, the width of the model's embeddings.
        low: the lowest return of the data; in mode ``"decremented"`` the lowest return to go.
        high: the highest one. A wider range than the data's allows targets beyond them, by linear extrapolation.
        mode: which return the rows carry and where: ``"constant"`` or ``"decremented"``, see
            :func:`~torchrl_lang.functional.return_conditions`. Training and play use the same.
        target: the return that a policy asks for by default; default ``high``.
        n_bins: number of different returns.

    Raises:
        ValueError: ``low`` lies above ``high``, ``target`` outside them, a number is not finite, or ``mode`` is
            unknown.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.returns import ReturnConditions
        >>> from torchrl_lang.modules import ReturnEmbedding
        >>> returns = ReturnEmbedding(8, low=-10.0, high=0.0, n_bins=11)
        >>> tokens, mask = torch.tensor([[4, 6]]), torch.tensor([[True, False]])
        >>> conditions = ReturnConditions(torch.full((1, 2), -7.8), mask)
        >>> returns.condition(tokens, conditions, vocab_size=100)  # -7.8 is rounded to return 2 of 0 to 10
        tensor([[304,   6]])
    """

    def __init__(
        self,
        width: int,
        low: float,
        high: float,
        *,
        mode: ReturnMode = "constant",
        target: float | None = None,
        n_bins: int = 1001,
    ) -> None:
        super().__init__()
        one_of("mode", mode, ("constant", "decremented"))
        target = high if target is None else target
        for name, value in (("low", low), ("high", high), ("target", target)):
            finite(name, value, low=None)
        if low > high:
            raise ValueError(f"low={low} lies above high={high}: give the lowest and the highest return.")
        if width < 1 or n_bins < 2:
            raise ValueError(f"width must be at least 1 and n_bins at least 2, got width={width} and n_bins={n_bins}.")
        self.low, self.high, self.mode, self.target, self.n_bins = low, high, mode, target, n_bins
        self.check(torch.tensor(target, dtype=torch.float64, device="cpu"), "target")  # also under the meta device
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    @property
    def width(self) -> int:
        """``H``, the width of an embedding."""
        return self.weight.shape[0]

    def config(self) -> dict[str, Any]:
        """Arguments that build an embedding of the same shape, range and mode."""
        names = ("width", "low", "high", "mode", "target", "n_bins")
        return {name: getattr(self, name) for name in names}

    def check(self, returns: Tensor, name: str) -> None:
        """Raise ValueError unless all returns, any shape, lie in the range, up to the rounding to a bin."""
        outside = self.outside(returns)
        if bool(outside.any()):
            raise ValueError(
                f"{name} must lie in [{self.low:g}, {self.high:g}], the range of the ReturnEmbedding, got "
                f"{float(returns[outside][0]):g}: give another return, or train with a wider low and high."
            )

    def outside(self, returns: Tensor) -> Tensor:
        """True where a return is not in the range, up to the rounding to a bin."""
        rounding = max((self.high - self.low) / (self.n_bins - 1) / 2, 1e-6 * max(abs(self.low), abs(self.high)))
        return ~((returns >= self.low - rounding) & (returns <= self.high + rounding))

    def condition(self, tokens: Tensor, conditions: ReturnConditions, vocab_size: int) -> Tensor:
        """The ids of ``tokens``, int ``[*B, T]``, with the returns that they carry, int64 ``[*B, T]``.

        A return outside the range is replaced by its nearest end, as a return to go may become after a target that
        was too low or too high.

        Args:
            tokens: ids below ``vocab_size``.
            conditions: the returns and which tokens carry them.
            vocab_size: ``V``, the number of the model's embeddings.
        """
        span = self.high - self.low
        share = (conditions.returns - self.low) / span if span else torch.zeros_like(conditions.returns)
        number = (share.clamp(0, 1) * (self.n_bins - 1)).round().long()
        return tokens.long() + torch.where(conditions.mask, vocab_size * (number + 1), 0)

    def embed(self, ids: Tensor, embedding: Callable[[Tensor], Tensor], vocab_size: int) -> Tensor:
        """Embeddings of tokens and of the returns that they carry, int64 ``[*B, T] -> [*B, T, H]``.

        Args:
            ids: from :meth:`condition`.
            embedding: the model's, of ids below ``vocab_size``.
            vocab_size: ``V``.
        """
        embedded = embedding(ids.remainder(vocab_size))
        return embedded + self(ids.div(vocab_size, rounding_mode="floor")).to(embedded.dtype)

    def forward(self, number: Tensor) -> Tensor:
        """The embedding of a return, int64 ``[*B] -> [*B, H]``: zero for number 0, else of return ``number - 1``."""
        carried = (number > 0).unsqueeze(-1).to(self.weight.dtype)
        scaled = (number - 1).unsqueeze(-1).to(self.weight.dtype) * (2 / (self.n_bins - 1)) - 1
        # Not a matrix product: autocast would round the return to 8 bits.
        return carried * (scaled * self.weight + self.bias)
