"""Returns of rows, the best rows (%BC, rejection sampling, expert iteration), and pairs of better and worse ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, Unit, check_options, checked
from torchrl_lang.data.dataset import RowDataset
from torchrl_lang.functional import decision_mask, shift_left, turn_end_mask
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, GROUP, TOKEN_REWARD, TOKENS, entry


@checked
def row_returns(
    rows: TensorDictBase, *, gamma: Unit = 1.0, reward_key: NestedKey = TOKEN_REWARD, end_of_action: int | None = None
) -> Tensor:
    """The return of each episode, ``sum_j gamma**k_j * r_j``, where token ``j`` belongs to turn ``k_j``.

    Turns are counted from 0, so the first one is not discounted, and all tokens of a turn have the same discount. Sums
    are computed in float64, so that they do not depend on the padding.

    Args:
        rows: rows ``[*B]``. After :class:`~torchrl_lang.transforms.KLConstrainedTransform` their ``token_reward`` is
            the reward minus the divergence, and ``raw_reward`` the environment's reward.
        gamma: discount per turn.
        reward_key: the rewards of tokens, float ``[*B, T]``.
        end_of_action: id of the token that ends an utterance, if the environment may write nothing between two of them
            (see :func:`~torchrl_lang.functional.turn_end_mask`).

    Returns:
        float64 ``[*B]``.

    Raises:
        KeyError: an entry is missing, such as the rewards.
        ValueError: the rewards have the wrong shape, or ``gamma`` is out of range.

    Examples:
        >>> from torchrl_lang.data import row_returns
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> turns = [Turn("ab", reward=1.0), Turn("c"), Turn("a", reward=4.0)]
        >>> rows = to_rows([Episode(turns, True)], CharTokenizer.from_alphabet("abc"), 12)
        >>> row_returns(rows), row_returns(rows, gamma=0.5)
        (tensor([5.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    agent_mask, reward = entry(rows, AGENT_MASK), entry(rows, reward_key)
    if reward.shape != agent_mask.shape:
        raise ValueError(f"{reward_key!r} must have one reward per token, {tuple(agent_mask.shape)}.")
    earned = torch.where(decision_mask(agent_mask), shift_left(reward.double()), 0.0)
    if gamma == 1:
        return earned.sum(-1)
    ends = turn_end_mask(entry(rows, ATTENTION_MASK), agent_mask, entry(rows, TOKENS), end_of_action)
    turn = ends.cumsum(-1) - ends.long()
    return (gamma ** turn.double() * earned).sum(-1)


@checked
def best_rows(
    rows: RowDataset | TensorDictBase,
    n: Count | None = None,
    *,
    fraction: Annotated[float, "(0, 1]"] | None = None,
    bottom_fraction: Annotated[float, "(0, 1]"] | None = None,
    per: NestedKey | Tensor | None = None,
    by: Literal["return", "tokens"] | Tensor = "return",
    gamma: float = 1.0,
    reward_key: NestedKey = TOKEN_REWARD,
    end_of_action: int | None = None,
) -> TensorDictBase:
    """Select the best episodes, copied and in their original order. Ties prefer the earlier row.

    Args:
        rows: a dataset, or rows ``[N]``.
        n: number of rows to keep; all of them if there are fewer. Give either ``n`` or ``fraction``.
        fraction: in ``(0, 1]``; keeps ``int(fraction * N)`` rows, at least one, as ``top_p`` in the code of the ILQL
            paper (arXiv 2206.11871).
        bottom_fraction: in ``(0, 1]``; choose among the worst ``int(bottom_fraction * N)`` rows, at least one, instead
            of all: ``bottom_p`` in that code. Alone it keeps all of these.
        per: the group of each row, such as its prompt or game: a key of the rows, int64 ``[N]`` or ``[N, 1]``, or such
            a tensor. Then all numbers are those of each group.
        by: ``"return"`` prefers the highest :func:`row_returns`, ``"tokens"`` the shortest rows, a tensor ``[N]`` its
            highest values.
        gamma: discount per turn.
        reward_key: the rewards of tokens, see :func:`row_returns`.
        end_of_action: id of the token that ends an utterance, see :func:`row_returns`.

    Returns:
        Rows ``[M]`` with all their entries; ``M`` may be 0.

    Raises:
        KeyError: an entry is missing.
        ValueError: a number is out of range, both ``n`` and ``fraction`` are given, or nothing is, shapes do not match,
            or a score is NaN.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import best_rows
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("a", reward=r)], True) for r in (1.0, 3.0, 2.0, 3.0)], tokenizer, 5)
        >>> best_rows(rows, 2)["token_reward"].sum(-1)
        tensor([3., 3.])
        >>> best_rows(rows, fraction=0.5, per=torch.tensor([0, 1, 0, 1]))["token_reward"].sum(-1)
        tensor([3., 2.])
        >>> best_rows(rows, 1, bottom_fraction=0.5)["token_reward"].sum(-1)
        tensor([2.])
    """
    entries = rows.rows if isinstance(rows, RowDataset) else rows
    fraction = 1.0 if n is None and fraction is None and bottom_fraction is not None else fraction
    if (n is None) == (fraction is None):
        raise ValueError(f"Give either n or fraction, the rows to keep: got n={n} and fraction={fraction}.")
    score = _scores(entries, by, gamma, reward_key, end_of_action)
    group = _groups(entries, per)
    index = torch.arange(score.shape[0], device=score.device)
    if bottom_fraction is not None:
        index = index[_best(-score[index], group[index], None, bottom_fraction)]
    return rows[index[_best(score[index], group[index], n, fraction)]]


@checked
def preference_pairs(
    rows: RowDataset | TensorDictBase,
    n: Count | None = 1,
    *,
    per: NestedKey | Tensor | None = None,
    by: Literal["return", "tokens"] | Tensor = "return",
    gamma: float = 1.0,
    reward_key: NestedKey = TOKEN_REWARD,
    end_of_action: int | None = None,
) -> TensorDictBase:
    """Pairs of a better and a worse episode that begin alike, for DPO and IPO.

    Rows begin alike if they have the same tokens before the agent's first one and, where they have one, the same
    ``group``. Of those the best is paired with the worst, the second best with the second worst, and so on; pairs of
    equal scores and of equal tokens are left out, and so are rows without an agent's token.

    Args:
        rows: a dataset, or rows ``[N]``.
        n: number of pairs of rows that begin alike; None for as many as there are, half as many as rows.
        per: further what rows of a pair must have in common: a key of the rows, int64 ``[N]`` or ``[N, 1]``, or such a
            tensor. None stands for ``"group"`` where rows have it: the number of the start of an episode, which
            environments with a ``group_size`` write, and of the pair in datasets of preferences. Zeros pair rows of
            different groups.
        by: the scores: ``"return"``, ``"tokens"`` or a tensor ``[N]``, as in :func:`best_rows`.
        gamma: discount per turn.
        reward_key: the rewards of tokens, see :func:`row_returns`.
        end_of_action: id of the token that ends an utterance, see :func:`row_returns`.

    Returns:
        Pairs ``[M, 2]``, the better row first, with all entries of the rows, by their beginnings and then by rank.
        :func:`row_buffer` samples them; ``M`` may be 0.

    Raises:
        KeyError: an entry is missing.
        ValueError: shapes do not match, or a score is NaN.

    Examples:
        >>> from torchrl_lang.data import preference_pairs, row_returns
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> asked = [("b", "a", 1.0), ("c", "a", 5.0), ("b", "c", 3.0), ("b", "b", 2.0), ("c", "b", 5.0)]
        >>> games = [Episode([Turn(question), Turn(answer, reward)], True) for question, answer, reward in asked]
        >>> pairs = preference_pairs(to_rows(games, CharTokenizer.from_alphabet("abc"), 7))
        >>> row_returns(pairs)
        tensor([[3., 1.]], dtype=torch.float64)
    """
    entries = rows.rows if isinstance(rows, RowDataset) else rows
    per = GROUP if per is None and GROUP in entries.keys() else per
    score = _scores(entries, by, gamma, reward_key, end_of_action)
    order = score.argsort(descending=True, stable=True)
    order = order[entry(entries, AGENT_MASK)[order].any(-1)]
    begin = entry(entries, AGENT_MASK)[order].long().argmax(-1)
    width = int(begin.max()) if len(begin) else 0
    opening = entry(entries, TOKENS)[order, :width].long()
    opening = torch.where(torch.arange(width, device=opening.device) < begin[:, None], opening, -1)
    alike = torch.cat([_groups(entries, per)[order, None], opening], -1)
    start, by_start = alike.unique(dim=0, return_inverse=True)[1].sort(stable=True)
    order = order[by_start]  # by start, then by descending score
    which, size, rank = _places_in_groups(start)
    worse = order[torch.arange(len(order), device=order.device) + size[which] - 1 - 2 * rank]
    tokens = entry(entries, TOKENS)  # nothing is learned of equal rows, as of an utterance before both answers
    kept = (score[order] > score[worse]) & (tokens[order] != tokens[worse]).any(-1)
    kept &= rank < (order.shape[0] if n is None else n)
    return rows[torch.stack([order[kept], worse[kept]], -1)]


def _scores(
    rows: TensorDictBase, by: str | Tensor, gamma: float, reward_key: NestedKey, end_of_action: int | None
) -> Tensor:
    """The score of each row, ``[N]``; higher is better."""
    if isinstance(by, Tensor):
        score = by
    elif by == "return":
        score = row_returns(rows, gamma=gamma, reward_key=reward_key, end_of_action=end_of_action)
    else:
        check_options(by=(by, ("return", "tokens")))
        score = -row_length(entry(rows, ATTENTION_MASK))
    if score.shape != rows.shape or score.isnan().any():
        found = f"{int(score.isnan().sum())} NaN and the shape {tuple(score.shape)}"
        raise ValueError(f"Scores must be numbers with the shape of the rows, {tuple(rows.shape)}, got {found}.")
    return score


def _groups(rows: TensorDictBase, per: NestedKey | Tensor | None) -> Tensor:
    """The group of each row, int64 ``[N]``."""
    if per is None:
        return torch.zeros(rows.shape, dtype=torch.int64, device=entry(rows, TOKENS).device)
    group = per if isinstance(per, Tensor) else entry(rows, per)
    if group.numel() != rows.shape[0] or group.is_floating_point():
        raise ValueError(f"per must be one integer per row, [{rows.shape[0]}], got {group.dtype} {tuple(group.shape)}.")
    return group.reshape(-1)


def _best(score: Tensor, group: Tensor, n: int | None, fraction: float | None) -> Tensor:
    """Indices of the best rows of each group, int64 ``[M]``, ascending."""
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, then by descending score
    which, size, rank = _places_in_groups(group[order])
    share: Any = fraction  # given where n is not
    quota = size.new_full(size.shape, n) if n is not None else (share * size.double()).long().clamp_min(1)
    return order[rank < quota[which]].sort().values


def _places_in_groups(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of sorted groups ``[N]``: the number of each one's group ``[N]``, sizes ``[G]``, and its place in it ``[N]``."""
    _, which, size = group.unique_consecutive(return_inverse=True, return_counts=True)
    return which, size, torch.arange(len(group), device=group.device) - (size.cumsum(0) - size)[which]


def saved_rows(rows: TensorDictBase | None) -> dict[NestedKey, Tensor] | None:
    """A copy of rows as tensors by key, for a checkpoint."""
    return None if rows is None else dict(rows.clone().items(True, True))


def restored_rows(entries: Mapping[NestedKey, Tensor] | None) -> TensorDictBase | None:
    """The rows ``[N]`` of :func:`saved_rows`, a copy on the device of the tensors."""
    return None if entries is None else TensorDict(entries).auto_batch_size_(1).clone()


class RowPool:
    """Rows that are kept, ``[M]``, and their state in a checkpoint. Abstract: ``extend`` of a subclass chooses them."""

    _rows: TensorDictBase | None = None

    def __len__(self) -> int:
        return 0 if self._rows is None else self._rows.shape[0]

    @property
    def rows(self) -> TensorDictBase:
        """The rows kept, ``[M]``.

        Raises:
            RuntimeError: no rows were added yet.
        """
        if self._rows is None:
            raise RuntimeError("The buffer has no rows yet: call extend(rows) first.")
        return self._rows

    def _with_kept(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows kept and then these, ``[M + N]``."""
        if self._rows is None:
            return rows
        if differ := {*self._rows.keys(True, True)} ^ {*rows.keys(True, True)}:
            found = f"{sorted(map(str, differ))} are in those that are kept or in the new ones alone"
            raise ValueError(f"Rows of a pool have the same entries, {found}: leave them out with rows.exclude(...).")
        kept: TensorDictBase = self._rows if rows.device is None else self._rows.to(rows.device)
        return torch.cat([kept, rows], 0)

    def state_dict(self) -> dict[str, Any]:
        """The rows kept, as tensors by key."""
        return {"rows": saved_rows(self._rows)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the rows by saved ones, of a buffer with the same options.

        They stay on the device of these tensors; rows that are added later are moved there.
        """
        self._rows = restored_rows(state_dict["rows"])


class BestRows(RowPool):
    """Keeps the best of all rows that :meth:`extend` gets, for rejection sampling and expert iteration.

    The result equals :func:`best_rows` of all rows at once: ties prefer the earlier row, and rows keep the order in
    which they came. Scores are computed from the rows when they are added. Memory grows with the rows that are kept.

    Args:
        capacity: number of rows to keep, with ``per`` of each group.
        per: a key of the rows, int64 ``[N]`` or ``[N, 1]``: the group of each row.
        by, gamma, reward_key, end_of_action: as in :func:`best_rows`.

    Examples:
        >>> from torchrl_lang.data import BestRows
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer, pool = CharTokenizer.from_alphabet("abc"), BestRows(2)
        >>> for rewards in ((1.0, 3.0), (0.0, 2.0), (1.0, 0.0)):
        ...     _ = pool.extend(to_rows([Episode([Turn("a", reward=r)], True) for r in rewards], tokenizer, 5))
        >>> pool.rows["token_reward"].sum(-1)
        tensor([3., 2.])
    """

    @checked
    def __init__(
        self,
        capacity: Count,
        *,
        per: NestedKey | None = None,
        by: Literal["return", "tokens"] = "return",
        gamma: float = 1.0,
        reward_key: NestedKey = TOKEN_REWARD,
        end_of_action: int | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"n": capacity, "per": per, "by": by, "gamma": gamma}
        self._options |= {"reward_key": reward_key, "end_of_action": end_of_action}

    def extend(self, rows: RowDataset | TensorDictBase) -> BestRows:
        """Keep the best of the stored rows and these, ``[N]``, which must have the same width ``T``; returns self."""
        fresh = best_rows(rows, **self._options)
        self._rows = best_rows(self._with_kept(fresh), **self._options)
        return self


class LatestRows(RowPool):
    """Keeps the latest of all rows that :meth:`extend` gets, in the order in which they came.

    Unlike a replay buffer of TorchRL with a storage of fixed size, its state holds the rows that it has, not all places
    of the storage, and its rows are a batch that can be read as a whole.

    Args:
        capacity: number of rows to keep.

    Examples:
        >>> from torchrl_lang.data import LatestRows
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer, pool = CharTokenizer.from_alphabet("abc"), LatestRows(3)
        >>> for rewards in ((1.0, 3.0), (0.0, 2.0)):
        ...     _ = pool.extend(to_rows([Episode([Turn("a", reward=r)], True) for r in rewards], tokenizer, 5))
        >>> pool.rows["token_reward"].sum(-1)
        tensor([3., 0., 2.])
    """

    @checked
    def __init__(self, capacity: Count) -> None:
        self.capacity = capacity

    def extend(self, rows: TensorDictBase) -> LatestRows:
        """Add rows ``[N]``, which must have the same width ``T`` and entries; returns self."""
        self._rows = self._with_kept(rows)[-self.capacity :].clone()
        return self
