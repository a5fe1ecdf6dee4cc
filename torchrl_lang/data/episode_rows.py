"""Rows of whole episodes from a collector's batches, which may begin and end in the middle of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.data.rollouts import COLLECTED, rows_at
from torchrl_lang.data.step_values import check_steps, reward_entries
from torchrl_lang.schema import (
    ATTENTION_MASK,
    DONE,
    FEATURES,
    FEATURES_MASK,
    REWARD,
    ROW_KEYS,
    TERMINATED,
    TRUNCATED,
    missing_entry,
)

__all__ = ["EpisodeRows"]

_TRAJECTORY = ("collector", "traj_ids")
_BATCH = ("collector", "batch_number")
_MOST_BATCHES = 128
"""Unfinished episodes of at most this many batches may wait; it exceeds the number of workers of a collector."""


class EpisodeRows:
    """Convert a collector's batches, one after the other, to the rows of the episodes that end in each batch.

    By default the steps of an episode that is unfinished at the end of a batch are kept until the batch in which it
    ends. So no episode is cut, and short episodes are not over-represented. This works with single-process,
    multi-process, synchronous and asynchronous collectors, because episodes are distinguished by the collector's
    ``traj_ids``. A call costs a few tensor operations, whatever the number of episodes.

    Args:
        carry: entries that the policy wrote for each token of its utterances, ``[*B, time, K]``, or for each turn,
            ``[*B, time, 1]``; they are scattered to the tokens' positions, ``[N, T]``. A mapping renames them.
        keep: entries ``[*B, time, ...]`` of the last ``next`` observation to copy beside the row.
        reward_key: the step reward that ``token_reward`` sums to, as in
            :func:`~torchrl_lang.data.rows_from_rollout`. The default is the transformed reward; None keeps the
            environment's own token rewards.
        unfinished: what happens to an episode that is unfinished at the end of a batch. ``"wait"``: it continues in the
            next batch. With a collector that resets at each batch (``reset_at_each_iter=True``) no episode continues:
            ``"truncate"`` returns it marked truncated, ``"drop"`` drops it, which over-represents short episodes.

    Raises:
        KeyError: on calls, the steps do not come from a collector over a language environment, or lack the reward or an
            entry to carry.
        ValueError: on calls, an episode began before the first batch, ``MultiStep`` changed the steps,
            log-probabilities are carried of random actions (``init_random_frames``), or values of the rows are invalid,
            see :func:`~torchrl_lang.schema.check_values`.
        RuntimeError: on calls with ``"wait"``, unfinished episodes of more than 128 batches wait, because the collector
            does not continue them.

    Examples:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_lang.data import EpisodeRows
        >>> from torchrl_lang.envs import WordleEnv
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer
        >>> words = ["crane", "slate", "purge", "mouse"]
        >>> env = WordleEnv(words, batch_size=[8], seed=0)
        >>> collector = Collector(env, RandomWordPlayer(words, seed=0), frames_per_batch=16, total_frames=160)
        >>> rows_of = EpisodeRows()
        >>> rows = [rows_of(steps) for steps in collector]  # two turns a batch
        >>> all(bool(batch["terminated"].all()) for batch in rows), sum(map(len, rows)) + rows_of.waiting <= 160
        (True, True)
    """

    def __init__(
        self,
        carry: Sequence[str] | Mapping[str, NestedKey] = (),
        keep: Sequence[str] = (),
        *,
        reward_key: NestedKey | None = REWARD,
        unfinished: Literal["wait", "truncate", "drop"] = "wait",
    ) -> None:
        one_of("unfinished", unfinished, ("wait", "truncate", "drop"))
        self.reward_key, self.unfinished = reward_key, unfinished
        self._batches = 0
        self.carry = dict(carry) if isinstance(carry, Mapping) else {key: key for key in carry}
        self.keep = tuple(keep)
        self._steps: TensorDictBase | None = None

    @property
    def waiting(self) -> int:
        """Number of unfinished episodes."""
        return 0 if self._steps is None else self._steps.get(_TRAJECTORY).unique().numel()

    def forget(self) -> None:
        """Drop the unfinished episodes, for instance after a reset of the collector."""
        self._steps = None

    def __call__(self, steps: TensorDictBase, *, only_waiting: bool = False) -> TensorDict:
        """Return the rows ``[N]`` of the episodes that end in ``steps`` ``[*B, time]``; ``N`` may be 0.

        With ``only_waiting``, episodes that begin in ``steps`` are dropped, whatever their length. Collecting like this
        until :attr:`waiting` is 0 finishes all episodes that began before, without preferring short ones.
        """
        flat = self._needed(steps)
        check_steps(steps, list(self.carry.values()))
        is_step = steps.get(COLLECTED, None)
        flat = flat.reshape(-1) if is_step is None else flat[is_step]
        self._batches += 1
        flat.set(_BATCH, torch.full(flat.shape, self._batches, device=flat.get(_TRAJECTORY).device))
        if only_waiting:
            waiting = flat[:0] if self._steps is None else self._steps
            flat = flat[torch.isin(flat.get(_TRAJECTORY), waiting.get(_TRAJECTORY))]
        if self._steps is not None:
            flat = torch.cat([self._steps, flat])
        # Stable sort: the steps of an episode keep their order. The steps themselves are gathered only once, below.
        trajectory, order = flat.get(_TRAJECTORY).sort(stable=True)
        ends = flat.get(("next", DONE)).squeeze(-1)[order]
        if self.unfinished == "truncate":
            ends = _is_last(trajectory)
        _, episode, count = trajectory.unique_consecutive(return_inverse=True, return_counts=True)
        has_ended = ends[count.cumsum(0) - 1][episode]  # whether the last step of the step's episode is among the ends
        self._wait(flat[order[~has_ended]])
        flat, ends = flat[order[has_ended]], ends[has_ended]
        return rows_at(flat, ends, keep=self.keep, carry=list(self.carry), reward_key=self.reward_key)

    def _wait(self, running: TensorDictBase) -> None:
        """Keep the steps of unfinished episodes; raise if the collector does not continue them."""
        self._steps = running if self.unfinished == "wait" else running[:0]
        # An unfinished episode continues in its worker's next batch. Workers deliver batches in turns, so at most as
        # many batches as there are workers have unfinished episodes, unless the collector resets.
        if self._steps.get(_BATCH)[_is_last(self._steps.get(_TRAJECTORY))].unique().numel() > _MOST_BATCHES:
            raise RuntimeError(
                f"{self.waiting} unfinished episodes of more than {_MOST_BATCHES} batches wait for steps. If "
                "the collector resets at each iteration (reset_at_each_iter=True), use unfinished='truncate' or "
                "'drop'. After a manual reset, call forget()."
            )

    def _needed(self, steps: TensorDictBase) -> TensorDict:
        """The entries that rows are made of."""
        step = steps.get("next")
        features = [key for key in (FEATURES, FEATURES_MASK) if step.get(key, None) is not None]
        after = (*ROW_KEYS, DONE, TERMINATED, *features, *self.keep, *reward_entries(step, self.reward_key).values())
        found: dict[NestedKey, Tensor | None] = {("next", key): step.get(key, None) for key in after}
        found |= {key: steps.get(key, None) for key in (ATTENTION_MASK, _TRAJECTORY)}
        found |= {name: steps.get(key, None) for name, key in self.carry.items()}
        missing = [key for key, value in found.items() if value is None]
        if missing:
            raise missing_entry(
                "EpisodeRows",
                missing,
                steps,
                "Pass the steps of a TorchRL collector over a language environment whose policy writes the carried "
                "entries.",
            )
        if TRUNCATED in step.keys():
            found["next", TRUNCATED] = step.get(TRUNCATED)
        return TensorDict(found, batch_size=steps.batch_size)


def _is_last(trajectory: Tensor) -> Tensor:
    """True on the last step of each episode, bool ``[M]``; the steps of an episode must be adjacent and in order."""
    return torch.cat([trajectory[1:] != trajectory[:-1], torch.ones_like(trajectory[:1], dtype=torch.bool)])
