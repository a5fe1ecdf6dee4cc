"""Rows of whole episodes out of a collector's batches, which begin and end in the middle of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang.data.rollouts import rows_at
from torchrl_lang.data.step_rewards import reward_entries, step_rewards
from torchrl_lang.data.step_to_token import carried
from torchrl_lang.functional.checks import one_of
from torchrl_lang.schema import ATTENTION_MASK, DONE, REWARD, ROW_KEYS, TERMINATED, TRUNCATED, check_row

__all__ = ["EpisodeRows"]

_TRAJECTORY = ("collector", "traj_ids")
_BATCH = ("collector", "batch_number")
_MOST_BATCHES = 128
"""So many batches' episodes may wait: more workers than collectors have."""


class EpisodeRows:
    """Takes a collector's batches one after the other and gives the rows of the episodes that end in each.

    By default an episode that still runs at the end of a batch waits with what is carried along; its row comes with the
    batch in which it ends. So no episode is cut, and over a run short ones are not preferred. Collectors of one process
    and of several, synchronous and not, will do: episodes are distinguished by the collector's ``traj_ids``. It costs a
    few tensor operations a batch, whatever the number of episodes.

    Args:
        carry: what the policy wrote for each token of its utterances, ``[*B, time, K]``, or for each turn, ``[*B,
            time, 1]``, to be taken along to the tokens' places, ``[N, T]``; a mapping renames it.
        keep: entries ``[*B, time, ...]`` of the last ``next`` observation to be kept beside the row.
        reward_key: the steps' reward that ``token_reward`` adds up to, as in
            :func:`~torchrl_lang.data.rows_from_rollout`: by default the one that the policy was given, as transforms
            left it; None keeps the environment's own token rewards.
        unfinished: what becomes of an episode that still runs at the end of a batch. ``"wait"``: it goes on in the next
            one. For a collector that begins anew with each batch, ``reset_at_each_iter=True``, no episode goes on:
            ``"truncate"`` takes it as it stands, marked truncated, ``"drop"`` leaves it out, which prefers short ones.

    Raises:
        KeyError: on calls, the steps come from no collector, or from no language environment, or have no such reward,
            or nothing to carry under that name.
        ValueError: on calls, an episode began before the first batch, or values of the rows make no sense, see
            :func:`~torchrl_lang.schema.check_values`.
        RuntimeError: on calls, with ``"wait"``, episodes of more than 128 batches wait, because the collector does not
            go on with them.

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
        """Number of episodes that have begun and not ended."""
        return 0 if self._steps is None else self._steps.get(_TRAJECTORY).unique().numel()

    def forget(self) -> None:
        """Drop the episodes that have not ended, as where the collector was reset."""
        self._steps = None

    def __call__(self, steps: TensorDictBase, *, only_waiting: bool = False) -> TensorDict:
        """Rows ``[N]`` of the episodes that end in ``steps`` ``[*B, time]``, the time last; there may be none.

        With ``only_waiting``, episodes that begin in ``steps`` are left out, whatever their length. Who collects so
        until none is :attr:`waiting`, and then begins anew, has lost none of those that had begun before.
        """
        flat = self._needed(steps).reshape(-1)
        self._batches += 1
        flat.set(_BATCH, torch.full(flat.shape, self._batches, device=flat.get(_TRAJECTORY).device))
        if only_waiting:
            flat = flat[self._is_waiting(flat)]
        if self._steps is not None:
            flat = torch.cat([self._steps, flat])
        # Stable, so that the steps of an episode keep their order.
        flat = flat[flat.get(_TRAJECTORY).argsort(stable=True)]
        last = _last_of_episodes(flat)
        ends = flat.get(("next", DONE)).squeeze(-1)
        if self.unfinished == "truncate":
            ends = last
        has_ended = _of_ended_episodes(flat, ends)
        self._wait(flat[~has_ended])
        flat, ends = flat[has_ended], ends[has_ended]
        rows = rows_at(flat, ends, self.keep)
        rewards = reward_entries(flat.get("next"), self.reward_key)
        rows.update({name: step_rewards(flat, ends, rows, key) for name, key in rewards.items()})
        if self.carry:
            rows.update(carried(flat, ends, rows.get("action_mask"), list(self.carry)))
        check_row(rows)
        return rows

    def _wait(self, running: TensorDictBase) -> None:
        """Keep the steps of episodes that go on, as long as there is a collector that can go on with them."""
        self._steps = running if self.unfinished == "wait" else running[:0]
        # An episode that goes on is in its collector's next batch. Workers deliver theirs in turns, so that episodes of
        # as many batches wait as there are workers; more of them than that, and some will never go on.
        if self._steps.get(_BATCH)[_last_of_episodes(self._steps)].unique().numel() > _MOST_BATCHES:
            raise RuntimeError(
                f"{self.waiting} episodes of more than {_MOST_BATCHES} batches wait for steps that do not come: does "
                "the collector reset at each iteration (reset_at_each_iter=True)? Then give unfinished='truncate' or "
                "'drop'. Where it was reset by hand, call forget()."
            )

    def _is_waiting(self, flat: TensorDictBase) -> Tensor:
        """True on the steps of episodes that have begun before, bool ``[M]``."""
        trajectory = flat.get(_TRAJECTORY)
        if self._steps is None:
            return torch.zeros_like(trajectory, dtype=torch.bool)
        return torch.isin(trajectory, self._steps.get(_TRAJECTORY))

    def _needed(self, steps: TensorDictBase) -> TensorDict:
        """What rows are made of, and nothing else."""
        step = steps.get("next")
        after = (*ROW_KEYS, DONE, TERMINATED, *self.keep, *reward_entries(step, self.reward_key).values())
        found: dict[NestedKey, Tensor | None] = {("next", key): step.get(key, None) for key in after}
        found |= {key: steps.get(key, None) for key in (ATTENTION_MASK, _TRAJECTORY)}
        found |= {name: steps.get(key, None) for name, key in self.carry.items()}
        missing = [key for key, value in found.items() if value is None]
        if missing:
            raise KeyError(
                f"These steps have no {missing}: they must come from a TorchRL collector over a language environment, "
                f"with a policy that writes what is carried. They have {sorted(map(str, steps.keys(True, True)))}."
            )
        truncated = step.get(TRUNCATED, None)
        if truncated is not None:
            found["next", TRUNCATED] = truncated
        out = TensorDict(batch_size=steps.batch_size)
        for key, value in found.items():
            out.set(key, value)
        return out


def _last_of_episodes(flat: TensorDictBase) -> Tensor:
    """True on the last step of each episode, bool ``[M]``; the steps of each stand together, in order."""
    trajectory = flat.get(_TRAJECTORY)
    return torch.cat([trajectory[1:] != trajectory[:-1], torch.ones_like(trajectory[:1], dtype=torch.bool)])


def _of_ended_episodes(flat: TensorDictBase, ends: Tensor) -> Tensor:
    """True on the steps of episodes whose last step is among ``ends``, bool ``[M]``."""
    _, number, count = flat.get(_TRAJECTORY).unique_consecutive(return_inverse=True, return_counts=True)
    return ends[count.cumsum(0) - 1][number]
