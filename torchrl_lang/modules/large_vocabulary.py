"""The Q head for a language model: with a row per token of its own, or tied to the embedding of a large vocabulary."""

from __future__ import annotations

from transformers import PreTrainedModel

from torchrl_lang.modules.qvalue_head import QValueHead
from torchrl_lang.modules.stacked_heads import HeadKind
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead

__all__ = ["LARGE_VOCABULARY", "default_qvalue_head"]

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
