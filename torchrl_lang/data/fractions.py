"""The best part of a data set, for behaviour cloning on it (%BC)."""

from __future__ import annotations

from typing import Literal

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.functional import row_length
from torchrl_lang.schema import ATTENTION_MASK, TOKEN_REWARD

__all__ = ["top_fraction"]


def top_fraction(
    rows: RowDataset | TensorDictBase, fraction: float, *, by: Literal["return", "tokens"] | Tensor = "return"
) -> TensorDictBase:
    """The best ``fraction`` of episodes, in memory and in their old order.

    Args:
        rows: a data set, or rows ``[N]``.
        fraction: in ``(0, 1]``; ``round(fraction * N)`` episodes are kept, at least one.
        by: "return" prefers the highest sum of rewards, "tokens" the shortest row, a float ``[N]`` its highest values.
            Among equals the earlier row is preferred.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, to_rows, top_fraction
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("a", reward=r)], True) for r in (1.0, 3.0, 2.0, 3.0)], tokenizer, 5)
        >>> top_fraction(rows, 0.5)["token_reward"].sum(-1)
        tensor([3., 3.])
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}: 0.1 is the best tenth.")
    entries = rows.rows if isinstance(rows, RowDataset) else rows
    score = _score(entries, by)
    if score.shape != entries.shape:
        raise ValueError(f"A score of shape {tuple(score.shape)} came for rows of shape {tuple(entries.shape)}.")
    keep = max(1, round(fraction * entries.shape[0]))
    best = score.argsort(descending=True, stable=True)[:keep].sort().values
    return rows[best]


def _score(rows: TensorDictBase, by: Literal["return", "tokens"] | Tensor) -> Tensor:
    if isinstance(by, Tensor):
        return by
    if by == "return":
        return rows.get(TOKEN_REWARD).sum(-1)
    if by == "tokens":
        return -row_length(rows.get(ATTENTION_MASK))
    raise ValueError(f"by must be 'return', 'tokens' or a tensor of scores, got {by!r}.")
