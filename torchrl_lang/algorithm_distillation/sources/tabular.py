"""The base class of tabular source algorithms: all tasks and streams step at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.base import HistorySource
from torchrl_lang.algorithm_distillation.sources.exploration import epsilon_greedy
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.schema import (
    ACTION,
    ACTION_LOG_PROB,
    DONE,
    EPISODE,
    EPISODE_STEP,
    OBSERVATION,
    REWARD,
    TERMINATED,
)

__all__ = ["TabularSource"]


class TabularSource(HistorySource):
    """Runs the learners of all streams at once on tabular tasks. Abstract: algorithms implement the methods below.

    Args:
        env: tasks of batch size ``[tasks, streams]``, with one task in each row of it. The source seeds and steps it.
        steps: steps of each stream.
        seed: seed of the environment and of the actions.

    Raises:
        ValueError: ``env`` has another batch size, or draws a task for each episode.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 2])
        >>> [block.shape for block in QLearning(env, 500).blocks(200)]
        [torch.Size([25, 2, 200]), torch.Size([25, 2, 200]), torch.Size([25, 2, 100])]
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, seed: int = 0) -> None:
        tasks = env.fixed_task
        if env.batch_dims != 2 or tasks is None or (tasks != tasks[:, :1]).any():
            raise ValueError(
                f"A source needs an environment of batch size [tasks, streams] with one task in each row, got "
                f"{list(env.batch_size)}: give task=numbers[:, None] and batch_size=[len(numbers), streams]."
            )
        described = [env.describe_task(number) for number in tasks[:, 0].tolist()]
        super().__init__(described, env.batch_size[1], steps, seed=seed)
        self.env = env
        self._n = env.batch_size.numel()

    @property
    def _device(self) -> torch.device:
        """Where the environment's tensors are, and all of the learners'."""
        return self.env.state.device

    # -- methods of an algorithm ---------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, random: RandomStream) -> None:
        """Begin all streams, ``N = tasks * streams``."""

    @abstractmethod
    def _best(self) -> Tensor:
        """The greedy actions, bool ``[N, A]``, at least one per row."""

    @abstractmethod
    def _epsilon(self, progress: float) -> Tensor:
        """The probability of a uniform action, float ``[N]``, after the share ``progress`` of the history."""

    @abstractmethod
    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        """Learn from a step: states, action, reward (float32) and whether the task has ended, each ``[N]``."""

    def describe(self) -> dict[str, Any]:
        """Algorithm, options, seed and environment as JSON, for the manifest of a history."""
        return {**super().describe(), "env": self.env.describe()}

    # -- the history ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def blocks(self, length: int = 200) -> Iterator[TensorDict]:
        """Run all streams on the environment's device and yield their steps, on the CPU.

        Blocks are ``[tasks, streams, length]``; the last one may be shorter. Another kind of device draws other random
        numbers.
        """
        at_least_one("length", length)
        self.env.set_seed(self.seed)
        observed = self.env.reset()
        random = RandomStream(generator=torch.Generator(self._device).manual_seed(self.seed))
        self._begin(random)
        self._episode = torch.zeros(self._n, dtype=torch.int64, device=self._device)
        self._episode_step = torch.zeros_like(self._episode)
        for first in range(0, self.steps, length):
            rows: list[dict[str, Tensor]] = []
            for step in range(first, min(first + length, self.steps)):
                row, observed = self._step(observed, step, random)
                rows.append(row)
            yield self._block(rows)

    def _step(self, observed: TensorDict, step: int, random: RandomStream) -> tuple[dict[str, Tensor], TensorDict]:
        env, n = self.env, self._n
        state = env.state.reshape(n)
        action, log_prob = epsilon_greedy(self._best(), self._epsilon(step / self.steps), random)
        acted = TensorDict({ACTION: action.reshape(env.batch_size)}, env.batch_size)
        following = env.step(acted).get("next")
        reward, terminated = following.get(REWARD).reshape(n), following.get(TERMINATED).reshape(n)
        self._learn(state, action, reward, env.state.reshape(n), terminated)
        done = following.get(DONE)
        row = {
            OBSERVATION: observed.get(OBSERVATION).flatten(0, 1),
            ACTION: action,
            REWARD: reward[:, None],
            DONE: done.reshape(n, 1),
            TERMINATED: terminated[:, None],
            ACTION_LOG_PROB: log_prob,
            EPISODE: self._episode,
            EPISODE_STEP: self._episode_step,
        }
        over = done.reshape(n)
        self._episode = self._episode + over
        self._episode_step = torch.where(over, 0, self._episode_step + 1)
        return row, env.maybe_reset(following)

    def _block(self, rows: list[dict[str, Tensor]]) -> TensorDict:
        shape = (*self.env.batch_size, len(rows))
        columns = {key: torch.stack([row[key] for row in rows], 1) for key in rows[0]}
        # Histories are kept and sampled on the CPU.
        return TensorDict({key: value.unflatten(0, shape[:2]).cpu() for key, value in columns.items()}, shape)
