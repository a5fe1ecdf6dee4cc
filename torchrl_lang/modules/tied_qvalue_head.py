"""Action values tied to a token embedding, without own parameters of the size of the vocabulary."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from torchrl_lang.modules.heads import ActionValueHead, HeadKind, LastLayer, QValueHead, cast_like
from torchrl_lang.modules.sharding import whole_weight


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
    contains ``E`` has its fingerprint in the ``state_dict``, and loading beside another embedding raises.

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
        kind: ``"mlp"`` or ``"residual"``.
        dropout: dropout probability of the ``"residual"`` kind.
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
        dropout: float = 0.0,
        detach_embedding: bool = True,
    ) -> None:
        weight: Any = embedding.weight
        super().__init__(width, n_heads, weight.shape[1] + 1, kind, dropout)
        self.detach_embedding = detach_embedding
        self._owned_elsewhere = _Reference(embedding)
        with torch.no_grad():  # initial values have the same variance as with an own row per token
            wide = torch.promote_types(weight.dtype, torch.float32)
            norm = torch.linalg.vector_norm(weight, dtype=wide) / max(weight.shape[0], 1) ** 0.5
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.out_weight[:, :-1] /= torch.where(norm > 0, norm, 1).to(self.out_weight.device)
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
    lm: PreTrainedModel,
    *,
    tied: bool | None = None,
    n_heads: int = 2,
    kind: HeadKind = "mlp",
    dropout: float = 0.0,
) -> QValueHead | TiedQValueHead:
    """A Q head that fits a language model, on its device.

    Args:
        lm: the model; its output embedding is that of a tied head.
        tied: whether the head is a :class:`TiedQValueHead`; by default if there are more than
            :data:`LARGE_VOCABULARY` ids.
        n_heads: ``n_q``.
        kind: ``"mlp"`` or ``"residual"``.
        dropout: dropout probability of the ``"residual"`` kind.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, default_qvalue_head
        >>> small, large = (
        ...     causal_lm(vocab_size=size, layers=1, width=8, heads=2, max_length=16) for size in (100, 50_000)
        ... )
        >>> type(default_qvalue_head(small)).__name__, type(default_qvalue_head(large)).__name__
        ('QValueHead', 'TiedQValueHead')
    """
    width, embedding = lm.config.hidden_size, lm.get_output_embeddings()
    size = embedding.weight.shape[0]
    if size > LARGE_VOCABULARY if tied is None else tied:
        return TiedQValueHead(width, embedding, n_heads=n_heads, kind=kind, dropout=dropout).to(lm.device)
    return QValueHead(width, size, n_heads=n_heads, kind=kind, dropout=dropout).to(lm.device)
