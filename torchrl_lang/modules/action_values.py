"""Base class of Q heads: values of all tokens or of some, and loss terms over the vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional import linear_cross_entropy
from torchrl_lang.functional.linear import LinearTerm, linear_margin
from torchrl_lang.modules.stacked_heads import StackedHeads

__all__ = ["ActionValueHead", "LastLayer", "few_of_many"]

# If the vocabulary has more tokens than this per token that is asked for, gathering rows of the last layer is cheaper
# than one product over the vocabulary.
_MANY = 128


def few_of_many(asked: int, vocabulary: int) -> bool:
    """Whether the values of ``asked`` tokens per state are cheaper from gathered rows than from the full table."""
    return asked * _MANY < vocabulary


class LastLayer(NamedTuple):
    """``value = features @ weight.T + bias + shift``: the input and the weights of a last layer."""

    features: Tensor
    """float ``[n_q, N, F]``."""
    weight: Tensor
    """float ``[n_q, V, F]``, or ``[1, V, F]`` if all heads share it."""
    bias: Tensor | None = None
    """float ``[n_q, V]``."""
    shift: Tensor | None = None
    """float ``[n_q, N]``: added to the values of all tokens of a state."""

    def table(self) -> Tensor:
        """Values of all tokens, ``[n_q, N, V]``."""
        if self.weight.shape[0] < self.features.shape[0]:
            values = self.features @ self.weight[0].mT
        elif self.bias is None:
            values = self.features @ self.weight.mT
        else:
            values = torch.baddbmm(self.bias.unsqueeze(1), self.features, self.weight.mT)
        return values if self.shift is None else values + self.shift.unsqueeze(-1)

    def rows(self, tokens: Tensor) -> Tensor:
        """Values of some tokens of each state, int64 ``[N, k] -> [n_q, N, k]``, from gathered rows of the weight."""
        index = tokens.flatten()
        rows = self.weight.index_select(1, index).unflatten(1, tokens.shape)  # [n_q or 1, N, k, F]
        if self.weight.shape[0] < self.features.shape[0]:
            values = (self.features.transpose(0, 1) @ rows[0].mT).transpose(0, 1)  # no copy of the rows for each head
        else:
            values = (self.features.unsqueeze(2) @ rows.mT).squeeze(2)
        if self.bias is not None:
            values = values + self.bias.index_select(1, index).unflatten(1, tokens.shape)
        return values if self.shift is None else values + self.shift.unsqueeze(-1)


class ActionValueHead(StackedHeads, ABC):
    """Base of the Q heads, ``hidden [*N, H] -> [*N, n_q, V]``. Abstract: subclasses implement the last layer.

    Values of a few tokens are computed from their rows of the last layer, and terms over the vocabulary in chunks.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """``V``."""

    @abstractmethod
    def last_layer(self, hidden: Tensor) -> LastLayer:
        """The last layer and its input, for states ``[N, H]``."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of all next tokens, ``[*N, H] -> [*N, n_q, V]``."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self.last_layer(flat).table().transpose(0, 1).unflatten(0, hidden.shape[:-1])

    def among(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Values of some next tokens, ``[*N, H], int64 [*N, k] -> [*N, n_q, k]``: ``forward`` at ``tokens``.

        If the vocabulary is large compared with ``k``, only the rows of these tokens are computed.

        Examples:
            >>> import torch
            >>> from torchrl_lang.modules import QValueHead
            >>> head, hidden, tokens = QValueHead(8, 900), torch.randn(2, 8), torch.tensor([[5, 7], [0, 899]])
            >>> torch.testing.assert_close(head.among(hidden, tokens)[1, :, 1], head(hidden)[1, :, 899])
        """
        flat, some = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1, tokens.shape[-1])
        layer = self.last_layer(flat)
        if few_of_many(some.shape[-1], self.vocab_size):
            values = layer.rows(some)
        else:
            values = layer.table().gather(-1, some.expand(layer.features.shape[0], -1, -1))
        return values.transpose(0, 1).unflatten(0, tokens.shape[:-1])

    def taken(self, hidden: Tensor, action: Tensor) -> Tensor:
        """Values of the taken tokens, ``[*N, H], int64 [*N] -> [*N, n_q]``: ``forward`` at ``action``.

        For a large vocabulary only the taken tokens' rows of the last layer are computed.
        """
        return self.among(hidden, action.unsqueeze(-1)).squeeze(-1)

    def cql_term(
        self,
        hidden: Tensor,
        action: Tensor,
        temperature: Tensor | float = 1.0,
        *,
        chunk_size: int | None = None,
        recompute: bool = False,
    ) -> LinearTerm:
        """:func:`~torchrl_lang.functional.cql_term` of the values of ``forward``, computed in chunks.

        Args:
            hidden: float ``[N, H]``.
            action: int64 ``[N]``.
            temperature: ``T > 0``.
            chunk_size: positions whose values over the vocabulary are in memory at a time; None for a few dozen
                megabytes.
            recompute: see :func:`~torchrl_lang.functional.linear_cross_entropy`; True for losses of ``each``.

        Returns:
            ``total``, the sum over decisions and heads; ``each``, ``[N, n_q]``; and ``taken``, ``[N, n_q]``, the values
            of :meth:`taken`.

        Examples:
            >>> import torch
            >>> from torchrl_lang.functional import cql_term
            >>> from torchrl_lang.modules import QValueHead
            >>> head, hidden, action = QValueHead(8, vocab_size=5), torch.randn(3, 8), torch.tensor([4, 0, 2])
            >>> torch.testing.assert_close(head.cql_term(hidden, action).each, cql_term(head(hidden), action))
        """
        options = {"temperature": temperature, "chunk_size": chunk_size, "recompute": recompute}
        return self._term(linear_cross_entropy, hidden, action, **options)

    def margin_term(
        self,
        hidden: Tensor,
        action: Tensor,
        margin: float = 0.0,
        *,
        chunk_size: int | None = None,
        recompute: bool = False,
    ) -> LinearTerm:
        """:func:`~torchrl_lang.functional.margin_term` of the values of ``forward``; otherwise as :meth:`cql_term`."""
        return self._term(linear_margin, hidden, action, margin=margin, chunk_size=chunk_size, recompute=recompute)

    def _term(self, function: Callable[..., LinearTerm], hidden: Tensor, action: Tensor, **options: Any) -> LinearTerm:
        """A term of the last layer per decision: ``each`` and ``taken`` ``[N, n_q]``.

        A shift of all values changes no term, only the values of the taken tokens.
        """
        features, weight, bias, shift = self.last_layer(hidden)
        n, positions, width = features.shape
        target = action
        if weight.shape[0] < n:  # heads share the weight: one layer with the positions of all heads
            features, target = features.reshape(1, n * positions, width), action.repeat(n)
        total, each, taken = function(features, weight, bias, target, **options)
        each, taken = each.reshape(n, positions), taken.reshape(n, positions)
        taken = taken if shift is None else taken + shift
        return LinearTerm(total, each.mT, taken.mT)
