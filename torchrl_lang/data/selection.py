"""Select the best rows, for behaviour cloning of the best episodes (%BC), rejection sampling and expert iteration."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.data.returns import row_returns
from torchrl_lang.functional import row_length
from torchrl_lang.schema import ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, entry

__all__ = ["best_rows", "check_number"]


def best_rows(
    rows: RowDataset | TensorDictBase,
    n: int | None = None,
    *,
    fraction: float | None = None,
    per: NestedKey | Tensor | None = None,
    by: Literal["return", "tokens"] | Tensor = "return",
    gamma: float = 1.0,
    reward_key: NestedKey = TOKEN_REWARD,
    end_of_action: int | None = None,
    finished_only: bool = False,
) -> TensorDictBase:
    """Select the best episodes, copied and in their original order. Ties prefer the earlier row.

    Args:
        rows: a dataset, or rows ``[N]``.
        n: number of rows to keep; all of them if there are fewer. Give either ``n`` or ``fraction``.
        fraction: in ``(0, 1]``; keeps ``round(fraction * N)`` rows, at least one.
        per: the group of each row, such as its prompt or game: a key of the rows, int64 ``[N]`` or ``[N, 1]``, or such
            a tensor. Then ``n`` or ``fraction`` of each group are kept.
        by: ``"return"`` prefers the highest :func:`row_returns`, ``"tokens"`` the shortest rows, a tensor ``[N]`` its
            highest values.
        gamma: discount per turn.
        reward_key: the rewards of tokens, see :func:`row_returns`.
        end_of_action: id of the token that ends an utterance, see :func:`row_returns`.
        finished_only: drop rows that are not ``terminated``.

    Returns:
        Rows ``[M]`` with all their entries; ``M`` may be 0.

    Raises:
        ValueError: ``n`` or ``fraction`` is out of range, both or none of them are given, shapes do not match, or a
            score is NaN.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, best_rows, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("a", reward=r)], True) for r in (1.0, 3.0, 2.0, 3.0)], tokenizer, 5)
        >>> best_rows(rows, 2)["token_reward"].sum(-1)
        tensor([3., 3.])
        >>> best_rows(rows, fraction=0.5, per=torch.tensor([0, 1, 0, 1]))["token_reward"].sum(-1)
        tensor([3., 2.])
    """
    entries = rows.rows if isinstance(rows, RowDataset) else rows
    if (n is None) == (fraction is None):
        raise ValueError(f"Give either n or fraction, the rows to keep: got n={n} and fraction={fraction}.")
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}: 0.1 is the best tenth.")
    if n is not None:
        check_number("n", n)
    score = _scores(entries, by, gamma, reward_key, end_of_action)
    group = _groups(entries, per)
    index = torch.arange(score.shape[0], device=score.device)
    if finished_only:
        index = index[entry(entries, TERMINATED).reshape(-1)]
    return rows[index[_best(score[index], group[index], n, fraction)]]


def _scores(
    rows: TensorDictBase,
    by: Literal["return", "tokens"] | Tensor,
    gamma: float,
    reward_key: NestedKey,
    end_of_action: int | None,
) -> Tensor:
    """The score of each row, ``[N]``; higher is better."""
    if isinstance(by, Tensor):
        score = by
    elif by == "return":
        score = row_returns(rows, gamma=gamma, reward_key=reward_key, end_of_action=end_of_action)
    elif by == "tokens":
        score = -row_length(entry(rows, ATTENTION_MASK))
    else:
        raise ValueError(f"by must be 'return', 'tokens' or a tensor of scores, got {by!r}.")
    if score.shape != rows.shape:
        raise ValueError(f"A score must have the shape of the rows, {tuple(rows.shape)}, got {tuple(score.shape)}.")
    if score.isnan().any():
        raise ValueError(f"{int(score.isnan().sum())} of {score.shape[0]} scores are NaN: correct the rewards.")
    return score


def _groups(rows: TensorDictBase, per: NestedKey | Tensor | None) -> Tensor:
    """The group of each row, int64 ``[N]``."""
    if per is None:
        return torch.zeros(rows.shape, dtype=torch.int64, device=entry(rows, TOKENS).device)
    group: Any = per if isinstance(per, Tensor) else rows.get(per, None)
    if group is None:
        raise ValueError(f"There is no {per!r} to group rows by; they have {sorted(map(str, rows.keys(True, True)))}.")
    if group.numel() != rows.shape[0] or group.is_floating_point():
        raise ValueError(f"per must be one integer per row, [{rows.shape[0]}], got {group.dtype} {tuple(group.shape)}.")
    return group.reshape(-1)


def _best(score: Tensor, group: Tensor, n: int | None, fraction: float | None) -> Tensor:
    """Indices of the best rows of each group, int64 ``[M]``, ascending."""
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, then by descending score
    _, which, size = group[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(order.shape[0], device=order.device) - (size.cumsum(0) - size)[which]
    quota = size.new_full(size.shape, n) if n is not None else (fraction * size.double()).round().clamp_min(1).long()
    return order[rank < quota[which]].sort().values


def check_number(name: str, number: int) -> None:
    """Raise unless a number of rows is at least 1."""
    if number < 1:
        raise ValueError(f"{name} must be at least 1 row, got {number}.")
