"""The best part of a data set, for behaviour cloning on it (%BC)."""

from __future__ import annotations

from typing import Literal

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.data.selection import best_rows

__all__ = ["top_fraction"]


def top_fraction(
    rows: RowDataset | TensorDictBase, fraction: float, *, by: Literal["return", "tokens"] | Tensor = "return"
) -> TensorDictBase:
    """:func:`best_rows` by a fraction alone.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, to_rows, top_fraction
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("a", reward=r)], True) for r in (1.0, 3.0, 2.0, 3.0)], tokenizer, 5)
        >>> top_fraction(rows, 0.5)["token_reward"].sum(-1)
        tensor([3., 3.])
    """
    return best_rows(rows, fraction=fraction, by=by)
