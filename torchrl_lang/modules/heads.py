"""Value heads: small networks with stacked weights for state values and action values, tied to an embedding or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lang._checks import check_options
from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.functional.linear import LinearTerm, linear_cross_entropy, linear_margin
from torchrl_lang.modules.hugging_face import hidden_size
from torchrl_lang.modules.sharding import whole_tensor, whole_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeadKind = Literal["mlp", "deep"]

OUT_STD = 0.01
"""Standard deviation of the initial weights of a last layer."""
NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""
CLIP = 3.0
"""Largest absolute value of a normalized state's numbers."""


class StackedHeads(nn.Module):
    """``n`` small networks of the same shape with stacked weights, ``hidden [N, H] -> [n, N, out]``.

    ``"mlp"``: ``Linear(H, 2H)``, ReLU, ``Linear(2H, out)``, as in the ILQL paper (arXiv 2206.11871).
    ``"deep"``: two hidden layers ``relu(LN(W x))`` of width ``2H``, then ``Linear(2H, out)``, the heads of AgileRL.

    States are cast to the dtype of the weights, so heads in float32 over a model in half precision (the usual choice)
    compute values in float32. Under autocast everything runs in its precision.

    First layers are initialized like :class:`torch.nn.Linear`. The last layer begins with small weights (normal,
    0.01) and zero bias, so that initial values and their bootstrapped targets are near zero.

    With ``normalize``, for the states of a pretrained model, each state is scaled so that the median of its absolute
    values is that of a standard normal distribution, and clipped to 3 in absolute value; the last layer begins with
    zeros. In such states a few dimensions are larger than the others by a factor of fifty (arXiv 2402.17762): values
    would not begin near zero, steps that suit the other weights would be too large for those that read them, and a
    layer norm would make all others small.
    """

    def __init__(self, width: int, n: int, out: int, kind: HeadKind, normalize: bool) -> None:
        super().__init__()
        check_options(kind=(kind, ("mlp", "deep")), width=(width, 1), n_heads=(n, 1), outputs=(out, 1))
        self.kind, self.normalize, inner = kind, normalize, 2 * width
        self.in_weight = _linear_init(n, inner, width)
        self.in_bias = _linear_init(n, inner, fan_in=width)
        if kind == "deep":
            self.norm1_weight = nn.Parameter(torch.ones(n, 1, inner))
            self.norm1_bias = nn.Parameter(torch.zeros(n, 1, inner))
            self.mid_weight = _linear_init(n, inner, inner)
            self.mid_bias = _linear_init(n, inner, fan_in=inner)
            self.norm2_weight = nn.Parameter(torch.ones(n, 1, inner))
            self.norm2_bias = nn.Parameter(torch.zeros(n, 1, inner))
        self.out_weight = nn.Parameter(torch.empty(n, out, inner).normal_(0.0, 0.0 if normalize else OUT_STD))
        self.out_bias = nn.Parameter(torch.zeros(n, out))

    @property
    def width(self) -> int:
        """``H``, the width of the states."""
        return self.in_weight.shape[-1]

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return {"width": self.width, "kind": self.kind, "normalize": self.normalize}

    def features(self, hidden: Tensor) -> Tensor:
        """Input of the last layer, ``[N, H] -> [n, N, F]``."""
        n, inner, _ = self.in_weight.shape
        hidden = cast_like(hidden, self.in_weight)
        if self.normalize:
            scale = hidden.abs().median(-1, keepdim=True).values / NORMAL_MEDIAN
            hidden = (hidden / scale.clamp_min(1e-6)).clamp(-CLIP, CLIP)
        if self.kind == "mlp":
            x = F.linear(hidden, self.in_weight.flatten(0, 1), self.in_bias.flatten())  # all heads in one product
            return x.relu().unflatten(-1, (n, inner)).transpose(0, 1)
        x = torch.baddbmm(self.in_bias.unsqueeze(1), hidden.expand(n, -1, -1), self.in_weight.mT)
        x = _norm(x, self.norm1_weight, self.norm1_bias).relu()
        x = torch.baddbmm(self.mid_bias.unsqueeze(1), x, self.mid_weight.mT)
        return _norm(x, self.norm2_weight, self.norm2_bias).relu()

    def outputs(self, hidden: Tensor) -> Tensor:
        """Output of the last layer, ``[N, H] -> [n, N, out]``."""
        return torch.baddbmm(self.out_bias.unsqueeze(1), self.features(hidden), self.out_weight.mT)


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * weight + bias


def cast_like(states: Tensor, weight: Tensor) -> Tensor:
    """Cast states to the dtype of a weight; under autocast, which casts both, they are not changed."""
    return states if torch.is_autocast_enabled(states.device.type) else states.to(weight.dtype)


def _linear_init(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    bound = (fan_in or shape[-1]) ** -0.5
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


class ValueHead(StackedHeads):
    """State value, ``hidden [*N, H] -> [*N, 1]``.

    Kinds, initialization and parameters as in :class:`~torchrl_lang.modules.QValueHead` with ``V = 1``.

    Args:
        width: ``H``.
        kind: ``"mlp"`` or ``"deep"``.
        normalize: scale and clip states, and begin with values of zero: for pretrained models.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import ValueHead
        >>> ValueHead(8)(torch.randn(3, 8)).shape
        torch.Size([3, 1])
    """

    def __init__(self, width: int, *, kind: HeadKind = "mlp", normalize: bool = False) -> None:
        super().__init__(width, 1, 1, kind, normalize)

    def forward(self, hidden: Tensor) -> Tensor:
        """Value of each state, ``[*N, H] -> [*N, 1]``."""
        return self.outputs(hidden.reshape(-1, hidden.shape[-1]))[0].unflatten(0, hidden.shape[:-1])


class UtteranceQValueHead(StackedHeads):
    """Values of one utterance in its state from several heads in one module: ``hidden [*N, H] -> [*N, n_q]``.

    The hidden state has read the utterance, so the output is a number and not one for each next token as a
    :class:`~torchrl_lang.modules.QValueHead`'s, whose kinds, initialization and parameters these are with ``V = 1``.

    Args:
        width: ``H``.
        n_heads: ``n_q``; the minimum of two is used.
        kind: ``"mlp"`` or ``"deep"``.
        normalize: scale and clip states, and begin with values of zero: for pretrained models.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import UtteranceQValueHead
        >>> UtteranceQValueHead(8)(torch.randn(3, 8)).shape
        torch.Size([3, 2])
    """

    def __init__(self, width: int, *, n_heads: int = 2, kind: HeadKind = "mlp", normalize: bool = False) -> None:
        super().__init__(width, n_heads, 1, kind, normalize)

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return super().config() | {"n_heads": self.out_weight.shape[0]}

    def forward(self, hidden: Tensor) -> Tensor:
        """Value of each utterance, ``[*N, H] -> [*N, n_q]``."""
        values = self.outputs(hidden.reshape(-1, hidden.shape[-1])).squeeze(-1)  # [n_q, N]
        return values.mT.reshape(*hidden.shape[:-1], values.shape[0])


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
            values = fast_linear(self.features, self.weight[0])
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

    def cql_term(self, hidden: Tensor, action: Tensor, temperature: Tensor | float = 1.0, **options: Any) -> LinearTerm:
        """:func:`~torchrl_lang.functional.cql_term` of the values of ``forward``, computed in chunks.

        Args:
            hidden: float ``[N, H]``.
            action: int64 ``[N]``.
            temperature: ``T > 0``.
            **options: ``chunk_size``, positions whose values over the vocabulary are in memory at a time (default a few
                dozen megabytes), and ``recompute``, see ``torchrl_lang.functional.linear``; True
                for losses of ``each``.

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
        return self._term(linear_cross_entropy, hidden, action, temperature=temperature, **options)

    def margin_term(self, hidden: Tensor, action: Tensor, margin: float = 0.0, **options: Any) -> LinearTerm:
        """``margin_term`` of the values of ``forward``; otherwise as :meth:`cql_term`."""
        return self._term(linear_margin, hidden, action, margin=margin, **options)

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


class QValueHead(ActionValueHead):
    """Action values of all next tokens from several heads in one module: ``hidden [*N, H] -> [*N, n_q, V]``.

    Parameters, for ``n_q`` heads: ``in_weight`` ``[n_q, 2H, H]``, ``in_bias`` ``[n_q, 2H]``, ``out_weight``
    ``[n_q, V, 2H]``, ``out_bias`` ``[n_q, V]``; the ``"deep"`` kind also has ``norm1_*``, ``mid_*`` and ``norm2_*``,
    those of its hidden layers. For a large vocabulary a :class:`~torchrl_lang.modules.TiedQValueHead` is much cheaper.
    Over a model in half precision heads stay in float32: states are cast to the dtype of the weights.

    Args:
        width: ``H``.
        vocab_size: ``V``.
        n_heads: ``n_q``; ILQL uses the minimum of two.
        kind: ``"mlp"`` or ``"deep"``.
        normalize: scale and clip states, and begin with values of zero: for pretrained models.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import QValueHead
        >>> head = QValueHead(8, vocab_size=5)
        >>> hidden, action = torch.randn(3, 8), torch.tensor([4, 0, 2])
        >>> head(hidden).shape, head.taken(hidden, action).shape
        (torch.Size([3, 2, 5]), torch.Size([3, 2]))
    """

    def __init__(
        self, width: int, vocab_size: int, *, n_heads: int = 2, kind: HeadKind = "mlp", normalize: bool = False
    ) -> None:
        super().__init__(width, n_heads, vocab_size, kind, normalize)

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


class TiedQValueHead(ActionValueHead):
    """Action values whose last layer is a language model's embedding of the tokens: ``[*N, H] -> [*N, n_q, V]``.

    With ``E`` ``[V, D]`` the embedding and ``f_k`` the features of head ``k`` (see :class:`QValueHead`)::

        Q_k(h, a) = <W_k f_k(h) + b_k, E_a> + w_k . f_k(h) + c_k

    The last two terms are one number per state and head, so ``E`` need not represent a value that all tokens share; the
    CQL and margin terms do not depend on them. ``out_weight`` ``[n_q, D + 1, 2H]`` and ``out_bias`` ``[n_q, D + 1]``
    contain ``W, b`` and, as last row, ``w, c``. Initial values are as near zero as those of a :class:`QValueHead`.

    The head holds a reference to the language model's embedding, not a copy: ``E`` is not among its parameters, nor in
    its ``state_dict``, nor in a loss's target parameters (a target head reads the current ``E``), and it moves to
    another device with the language model only. :func:`copy.deepcopy` ties the copied head to the copied embedding if
    the same call copies the language model before it, as in a loss or an actor; otherwise both share ``E``.
    :func:`~torchrl_lang.modules.save_language_model` records which embedding it is. A loss none of whose networks
    contains ``E`` refuses the head.

    After Hugging Face's ``resize_token_embeddings`` replaces the embedding, build a new head.

    If ``E`` is in half precision and the head is not, the last product uses the precision of ``E``, because a converted
    copy of ``E`` would be as large as the vocabulary.

    By default no gradient flows from the values to ``E``. This saves the largest of the three products of a term over
    the vocabulary, and the memory of its gradient.

    Args:
        width: ``H``.
        embedding: a module with ``weight`` ``[V, D]``: ``lm.get_output_embeddings()``, whose rows are trained to be
            compared with states, or ``lm.get_input_embeddings()``; often they share one weight.
        n_heads: ``n_q``.
        kind: ``"mlp"`` or ``"deep"``.
        normalize: scale and clip states, and begin with values of zero: for pretrained models.
        detach_embedding: False trains ``E`` on the values as well, whatever a loss's ``detach_qvalue``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import TiedQValueHead, causal_lm
        >>> lm = causal_lm(vocab_size=900, layers=1, width=8, heads=2, max_length=16)
        >>> head = TiedQValueHead(8, lm.get_output_embeddings())
        >>> head(torch.randn(3, 8)).shape, sum(p.numel() for p in head.parameters())
        (torch.Size([3, 2, 900]), 594)
    """

    def __init__(
        self,
        width: int,
        embedding: nn.Module,
        *,
        n_heads: int = 2,
        kind: HeadKind = "mlp",
        normalize: bool = False,
        detach_embedding: bool = True,
    ) -> None:
        weight: Any = embedding.weight
        super().__init__(width, n_heads, weight.shape[1] + 1, kind, normalize)
        self.detach_embedding = detach_embedding
        self._owned_elsewhere = _Reference(embedding)
        with torch.no_grad():  # initial values have the same variance as with an own row per token
            wide = torch.promote_types(weight.dtype, torch.float32)
            norm = torch.linalg.vector_norm(weight, dtype=wide) / max(weight.shape[0], 1) ** 0.5
            norm = whole_tensor(norm).to(self.out_weight.device)
            self.out_weight[:, :-1] /= torch.where(norm > 0, norm, 1)
            self.out_weight[:, -1] = 0.0

    @property
    def embedding(self) -> nn.Module:
        """The module that holds ``E``."""
        return self._owned_elsewhere.module

    @property
    def vocab_size(self) -> int:
        """``V``, the current number of rows of the embedding."""
        return self._owned_elsewhere.module.weight.shape[0]

    def config(self) -> dict[str, Any]:
        """Arguments, beside the embedding, that build a head of the same shape."""
        own = {"n_heads": self.out_weight.shape[0], "detach_embedding": self.detach_embedding}
        return super().config() | own

    def last_layer(self, hidden: Tensor) -> LastLayer:
        """The last layer and its input, for states ``[N, H]``."""
        out = self.outputs(hidden)  # [n_q, N, D + 1]
        weight = whole_weight(self.embedding)
        weight = weight.detach() if self.detach_embedding else weight
        return LastLayer(cast_like(out[..., :-1], weight), weight.unsqueeze(0), shift=out[..., -1])


class _Reference:
    """Holds a module that belongs to another one: not registered, and not copied on its own."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        reference = copy(self)
        reference.module = memo.get(id(self.module), self.module)
        return reference


LARGE_VOCABULARY = 16_384
"""Number of token ids above which heads are tied by default.

An own last layer has ``n_q * V * 2H`` weights. At this size and ``H = 1024`` that is 67 million for two heads, and
Qwen's 151,936 ids would need 620 million, more than the whole model of that width.
"""


def default_qvalue_head(
    lm: PreTrainedModel, *, tied: bool | None = None, n_heads: int = 2, kind: HeadKind = "mlp", normalize: bool = False
) -> QValueHead | TiedQValueHead:
    """A Q head that fits a language model, on its device.

    Args:
        lm: the model; its output embedding is that of a tied head.
        tied: whether the head is a :class:`TiedQValueHead`; by default if there are more than
            :data:`LARGE_VOCABULARY` ids.
        n_heads: ``n_q``.
        kind: ``"mlp"`` or ``"deep"``.
        normalize: scale and clip states, and begin with values of zero: for pretrained models.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, default_qvalue_head
        >>> small, large = (
        ...     causal_lm(vocab_size=size, layers=1, width=8, heads=2, max_length=16) for size in (100, 50_000)
        ... )
        >>> type(default_qvalue_head(small)).__name__, type(default_qvalue_head(large)).__name__
        ('QValueHead', 'TiedQValueHead')
    """
    shape: Any = {"n_heads": n_heads, "kind": kind, "normalize": normalize}
    width, embedding = hidden_size(lm.config), lm.get_output_embeddings()
    size = embedding.weight.shape[0]
    if size > LARGE_VOCABULARY if tied is None else tied:
        return TiedQValueHead(width, embedding, **shape).to(lm.device)
    return QValueHead(width, size, **shape).to(lm.device)
