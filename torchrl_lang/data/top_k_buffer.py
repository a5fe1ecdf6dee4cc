"""A buffer of the best rows among batches of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

from torchrl_lang.data.datasets import RowDataset
from torchrl_lang.data.selection import best_rows, check_number
from torchrl_lang.schema import TOKEN_REWARD

__all__ = ["BestRows"]


class BestRows:
    """Keeps the best of all rows that :meth:`extend` gets, for rejection sampling and expert iteration.

    The result equals :func:`best_rows` of all rows at once: ties prefer the earlier row, and rows keep the order in
    which they came. Scores are computed from the rows when they are added. Memory grows with the rows that are kept.

    Args:
        capacity: number of rows to keep.
        per: a key of the rows, int64 ``[N]`` or ``[N, 1]``: the group of each row.
        per_group: maximal number of rows of each group; requires ``per``.
        by, gamma, reward_key, end_of_action, finished_only: as in :func:`best_rows`.

    Raises:
        ValueError: a number is below 1, or only one of ``per`` and ``per_group`` is given; on calls, rows differ in
            width or entries from the earlier ones.

    Examples:
        >>> from torchrl_lang.data import BestRows, CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer, pool = CharTokenizer.from_alphabet("abc"), BestRows(2)
        >>> for rewards in ((1.0, 3.0), (0.0, 2.0), (1.0, 0.0)):
        ...     _ = pool.extend(to_rows([Episode([Turn("a", reward=r)], True) for r in rewards], tokenizer, 5))
        >>> pool.rows["token_reward"].sum(-1)
        tensor([3., 2.])
    """

    def __init__(
        self,
        capacity: int,
        *,
        per: NestedKey | None = None,
        per_group: int | None = None,
        by: Literal["return", "tokens"] = "return",
        gamma: float = 1.0,
        reward_key: NestedKey = TOKEN_REWARD,
        end_of_action: int | None = None,
        finished_only: bool = False,
    ) -> None:
        check_number("capacity", capacity)
        if (per is None) != (per_group is None):
            raise ValueError(f"Give both per and per_group or none, got per={per!r} and per_group={per_group}.")
        if per_group is not None:
            check_number("per_group", per_group)
        self.capacity, self.per, self.per_group = capacity, per, per_group
        self._options: dict[str, Any] = {
            "by": by,
            "gamma": gamma,
            "reward_key": reward_key,
            "end_of_action": end_of_action,
            "finished_only": finished_only,
        }
        self._rows: TensorDictBase | None = None

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

    def extend(self, rows: RowDataset | TensorDictBase) -> BestRows:
        """Keep the best of the stored rows and these, ``[N]``, which must have the same width ``T``; returns self."""
        fresh = self._best(rows)
        if self._rows is not None:
            _check_alike(self._rows, fresh)
            kept = self._rows if fresh.device is None else self._rows.to(fresh.device)
            fresh = self._best(torch.cat([kept, fresh], 0))
        self._rows = fresh
        return self

    def state_dict(self) -> dict[str, Any]:
        """The rows kept, as tensors by key."""
        if self._rows is None:
            return {"rows": None}
        return {"rows": {key: self._rows.get(key).clone() for key in self._rows.keys(True, True)}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the rows by saved ones, of a buffer with the same options.

        They stay on the device of these tensors; rows that are added later are moved there.
        """
        entries = state_dict["rows"]
        if entries is None:
            self._rows = None
            return
        number = next(iter(entries.values())).shape[0]
        self._rows = TensorDict({key: value.clone() for key, value in entries.items()}, batch_size=[number])

    def _best(self, rows: RowDataset | TensorDictBase) -> TensorDictBase:
        if self.per is not None:
            rows = best_rows(rows, self.per_group, per=self.per, **self._options)
        return best_rows(rows, self.capacity, **self._options)


def _check_alike(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    mine, came = ({key: rows.get(key).shape[1:] for key in rows.keys(True, True)} for rows in (ours, theirs))
    different = sorted(str(key) for key in {*mine, *came} if mine.get(key) != came.get(key))
    if different:
        raise ValueError(
            f"New rows differ from the stored ones in {different}: rows must have the same width T and entries."
        )
