"""Value heads: what a state and each of its possible next tokens are worth, read off a hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lang.functional import LinearTerm, linear_cross_entropy, linear_margin, sampled_cross_entropy
from torchrl_lang.modules.trunk import HIDDEN, HIDDEN_PRE_NORM

__all__ = ["HeadKind", "QValueHead", "ValueHead"]

HeadKind = Literal["mlp", "residual"]

# Up to so many tokens one product over the vocabulary is cheaper than collecting a row of the last layer per sample.
_SMALL_VOCABULARY = 128


class _StackedHeads(nn.Module):
    """``n`` small networks of the same shape with stacked weights, ``hidden [N, H] -> [n, N, out]``.

    ``"mlp"``: ``Linear(H, 2H)``, ReLU, ``Linear(2H, out)``, read from ``hidden``.
    ``"residual"``: ``Linear(LN2(x + dropout(W2 gelu(W1 LN1(x)))))`` with inner width ``4H``, read from
    ``hidden_pre_norm``.

    First layers start as :class:`torch.nn.Linear` does. The last layer starts small (normal, 0.01) with zero bias, so
    that first values are near zero and the bootstrapped targets with them.
    """

    def __init__(self, width: int, n: int, out: int, kind: HeadKind, dropout: float) -> None:
        super().__init__()
        if kind not in ("mlp", "residual"):
            raise ValueError(f"kind must be 'mlp' or 'residual', got {kind!r}.")
        self.kind = kind
        inner, features = (2 * width, 2 * width) if kind == "mlp" else (4 * width, width)
        self.in_weight = _linear_init(n, inner, width)
        self.in_bias = _linear_init(n, inner, fan_in=width)
        if kind == "residual":
            self.norm1_weight = nn.Parameter(torch.ones(n, 1, width))
            self.norm1_bias = nn.Parameter(torch.zeros(n, 1, width))
            self.mid_weight = _linear_init(n, width, inner)
            self.mid_bias = _linear_init(n, width, fan_in=inner)
            self.norm2_weight = nn.Parameter(torch.ones(n, 1, width))
            self.norm2_bias = nn.Parameter(torch.zeros(n, 1, width))
        self.dropout = nn.Dropout(dropout)
        self.out_weight = nn.Parameter(torch.empty(n, out, features).normal_(0.0, 0.01))
        self.out_bias = nn.Parameter(torch.zeros(n, out))

    @property
    def in_key(self) -> str:
        """Which of the trunk's states these heads read."""
        return HIDDEN if self.kind == "mlp" else HIDDEN_PRE_NORM

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return {"width": self.in_weight.shape[-1], "kind": self.kind, "dropout": self.dropout.p}

    def features(self, hidden: Tensor) -> Tensor:
        """Input of the last layer, ``[N, H] -> [n, N, F]``."""
        n, inner, _ = self.in_weight.shape
        if self.kind == "mlp":
            first = F.linear(hidden, self.in_weight.flatten(0, 1), self.in_bias.flatten())  # all heads in one product
            return first.relu().unflatten(-1, (n, inner)).transpose(0, 1)
        x = F.layer_norm(hidden, hidden.shape[-1:]) * self.norm1_weight + self.norm1_bias  # [n, N, H]
        x = torch.baddbmm(self.in_bias.unsqueeze(1), x, self.in_weight.mT)
        x = torch.baddbmm(self.mid_bias.unsqueeze(1), F.gelu(x), self.mid_weight.mT)
        x = hidden + self.dropout(x)
        return F.layer_norm(x, x.shape[-1:]) * self.norm2_weight + self.norm2_bias

    def _all(self, hidden: Tensor) -> Tensor:
        return torch.baddbmm(self.out_bias.unsqueeze(1), self.features(hidden), self.out_weight.mT)  # [n, N, out]


def _linear_init(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    bound = (fan_in or shape[-1]) ** -0.5
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def _by_decision(term: LinearTerm) -> LinearTerm:
    """What stacked heads give, ``[n_q, N]``, decision by decision, ``[N, n_q]``."""
    return LinearTerm(term.total, term.each.mT, term.taken.mT)


class QValueHead(_StackedHeads):
    """Action values of every next token, by several heads in one module: ``hidden [*N, H] -> [*N, n_q, V]``.

    The two kinds are those of the ILQL paper (arXiv 2206.11871). Parameters, for ``n_q`` heads: ``in_weight``
    ``[n_q, 2H, H]``, ``in_bias`` ``[n_q, 2H]``, ``out_weight`` ``[n_q, V, 2H]``, ``out_bias`` ``[n_q, V]``; the
    ``"residual"`` kind has ``4H`` for the inner ``2H``, ``H`` in the last layer, and further ``norm1_*``, ``mid_*``,
    ``norm2_*``.

    Args:
        width: ``H``.
        vocab_size: ``V``.
        n_heads: ``n_q``; ILQL takes the least of two.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: of the ``"residual"`` kind.

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
        self.vocab_size = vocab_size

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        n, vocabulary, _ = self.out_weight.shape
        return super().config() | {"vocab_size": vocabulary, "n_heads": n}

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of all next tokens, ``[*N, H] -> [*N, n_q, V]``."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self._all(flat).transpose(0, 1).unflatten(0, hidden.shape[:-1])

    def taken(self, hidden: Tensor, action: Tensor) -> Tensor:
        """Values of the taken tokens alone, ``[*N, H], int64 [*N] -> [*N, n_q]``: what ``forward`` has at ``action``.

        Of a large vocabulary only the taken tokens' rows of the last layer are read.
        """
        flat, index = hidden.reshape(-1, hidden.shape[-1]), action.reshape(-1)
        if self.out_weight.shape[1] <= _SMALL_VOCABULARY:
            values = self._all(flat).gather(-1, index.expand(self.out_weight.shape[0], -1).unsqueeze(-1)).squeeze(-1)
        else:
            rows = self.out_weight.index_select(1, index)  # [n_q, N, F]
            values = (self.features(flat) * rows).sum(-1) + self.out_bias.index_select(1, index)
        return values.mT.unflatten(0, action.shape)

    def cql_term(
        self,
        hidden: Tensor,
        action: Tensor,
        temperature: Tensor | float = 1.0,
        *,
        chunk_size: int | None = None,
        recompute: bool = False,
    ) -> LinearTerm:
        """:func:`~torchrl_lang.functional.cql_term` of ``forward``'s values, which are computed piece by piece.

        Args:
            hidden: float ``[N, H]``.
            action: int64 ``[N]``.
            temperature: ``T > 0``.
            chunk_size: positions whose values over the vocabulary exist at a time; None for a few dozen megabytes.
            recompute: see :func:`~torchrl_lang.functional.linear_cross_entropy`: True for a loss made of ``each``.

        Returns:
            ``total``, the sum over decisions and heads; ``each``, ``[N, n_q]``; and ``taken``, ``[N, n_q]``, what
            :meth:`taken` gives.

        Examples:
            >>> import torch
            >>> from torchrl_lang.functional import cql_term
            >>> from torchrl_lang.modules import QValueHead
            >>> head, hidden, action = QValueHead(8, vocab_size=5), torch.randn(3, 8), torch.tensor([4, 0, 2])
            >>> torch.testing.assert_close(head.cql_term(hidden, action).each, cql_term(head(hidden), action))
        """
        term = linear_cross_entropy(
            self.features(hidden),
            self.out_weight,
            self.out_bias,
            action,
            temperature=temperature,
            chunk_size=chunk_size,
            recompute=recompute,
        )
        return _by_decision(term)

    def margin_term(
        self,
        hidden: Tensor,
        action: Tensor,
        margin: float = 0.0,
        *,
        chunk_size: int | None = None,
        recompute: bool = False,
    ) -> LinearTerm:
        """:func:`~torchrl_lang.functional.margin_term` of ``forward``'s values; all else as in :meth:`cql_term`."""
        term = linear_margin(
            self.features(hidden),
            self.out_weight,
            self.out_bias,
            action,
            margin=margin,
            chunk_size=chunk_size,
            recompute=recompute,
        )
        return _by_decision(term)

    def sampled_cql_term(
        self, hidden: Tensor, action: Tensor, temperature: Tensor | float = 1.0, *, negatives: Tensor
    ) -> LinearTerm:
        """:meth:`cql_term` estimated from ``negatives``, int64 ``[m]``; see
        :func:`~torchrl_lang.functional.sampled_cross_entropy` for its bias.
        """
        features = self.features(hidden)
        term = sampled_cross_entropy(
            features, self.out_weight, self.out_bias, action, negatives, temperature=temperature
        )
        return _by_decision(term)

    @classmethod
    def from_linears(cls, linears: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> QValueHead:
        """Build an ``"mlp"`` head from ``(weight, bias, weight, bias)`` of each head's two linear layers, copied.

        Examples:
            >>> import torch
            >>> from torchrl_lang.modules import QValueHead
            >>> linears = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
            >>> head = QValueHead.from_linears([(*linears[0].parameters(), *linears[1].parameters())])
            >>> hidden = torch.randn(2, 4)
            >>> torch.testing.assert_close(head(hidden)[:, 0], linears[1](linears[0](hidden).relu()))
        """
        head = cls(linears[0][0].shape[1], linears[0][2].shape[0], n_heads=len(linears))
        _fill(head, linears)
        return head


class ValueHead(_StackedHeads):
    """State value, ``hidden [*N, H] -> [*N, 1]``. Kinds, start and parameters as in :class:`QValueHead`, ``V = 1``.

    Args:
        width: ``H``.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: of the ``"residual"`` kind.

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
        return self._all(hidden.reshape(-1, hidden.shape[-1]))[0].unflatten(0, hidden.shape[:-1])

    @classmethod
    def from_linears(cls, linears: tuple[Tensor, Tensor, Tensor, Tensor]) -> ValueHead:
        """Build an ``"mlp"`` head from ``(weight, bias, weight, bias)`` of two linear layers, copied."""
        head = cls(linears[0].shape[1])
        _fill(head, [linears])
        return head


def _fill(head: _StackedHeads, linears: Sequence[tuple[Tensor, ...]]) -> None:
    with torch.no_grad():
        for parameter, parts in zip(
            (head.in_weight, head.in_bias, head.out_weight, head.out_bias), zip(*linears, strict=True), strict=True
        ):
            parameter.copy_(torch.stack(tuple(parts)))
