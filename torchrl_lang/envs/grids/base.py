"""The base class of small tabular tasks whose parameter, such as a goal, is hidden from the agent."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.row_state import read_action
from torchrl_lang.envs.seeded_env import EnvOptions, SeededEnv, token_ids
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import DONE, OBSERVATION, REWARD, TERMINATED, TRUNCATED


class TaskOptions(EnvOptions, total=False):
    """Options that every family takes: the task of each row, number of rows, seed and device."""

    task: Tensor | int | None


class HiddenTaskEnv(SeededEnv):
    """A batch of tabular tasks. Abstract: subclasses implement the methods below.

    A family has ``n_tasks`` tasks, ``n_states`` states and ``n_actions`` actions, all of them numbers; rows of a batch
    may have different tasks. The agent reads ``observation``, int64 ``[*B, D]``, and must infer the task from rewards.
    What it does not read is available to source algorithms and to evaluation: :attr:`task`, :attr:`state`,
    :meth:`optimal_actions` and :meth:`optimal_return`.

    An episode is **truncated** after ``episode_length`` steps. It is **terminated** when the task has ended, after
    which nothing could be earned; some tasks never terminate. A last step that does both terminates. Stepping a row
    that is done changes nothing, and its reward is zero.

    ``torch.compile(env.step, fullgraph=True)`` computes the same; an action out of range is then a RuntimeError.

    The seed alone determines the episodes, see :class:`~torchrl_lang.envs.seeded_env.SeededEnv`.

    Args:
        n_tasks, n_states, n_actions: the size of the family.
        observation_shape: the number ``D`` of an observation's numbers, and the number of values that each may have.
        episode_length: number of steps after which an episode is truncated.
        task: the task of each row for all of its episodes, an integer or int64 that broadcasts to ``batch_size``. By
            default every episode draws one of the family.
        batch_size: number of parallel rows, as a torch size.
        seed: seed of the episodes.
        device: device of the tensors.

    Raises:
        ValueError: a task is not an integer or not one of the family, or ``episode_length`` is below 1.
        RuntimeError: the shape of ``task`` does not broadcast to ``batch_size``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 8], seed=0)
        >>> env.task.shape, env.rollout(3).batch_size
        (torch.Size([25, 8]), torch.Size([25, 8, 3]))
    """

    @checked
    def __init__(
        self,
        *,
        n_tasks: int,
        n_states: int,
        n_actions: int,
        observation_shape: tuple[int, int],
        episode_length: Count,
        task: Tensor | int | None = None,
        **options: Unpack[EnvOptions],
    ) -> None:
        super().__init__(**options)
        self.n_tasks, self.n_states, self.n_actions = n_tasks, n_states, n_actions
        self.episode_length = episode_length
        self._fixed_task: Tensor | None
        fixed = None if task is None else self._task_numbers(task).expand(self.batch_size).reshape(-1).clone()
        self.register_buffer("_fixed_task", fixed, persistent=False)
        self._task: Tensor
        self._steps: Tensor
        self._number: Tensor
        numbers, values = observation_shape
        observation = {OBSERVATION: token_ids(values, self.batch_size, numbers, device=self.device)}
        self._set_specs(observation, token_ids(n_actions, self.batch_size, device=self.device))

    # -- methods of a family -------------------------------------------------------------------------------------------

    @abstractmethod
    def _start(self, episode: Tensor, task: Tensor) -> Tensor:
        """The first state of episodes with the numbers ``episode``, int64 ``[N]``."""

    @abstractmethod
    def _transition(self, state: Tensor, action: Tensor, task: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state int64, the reward float32 and whether the task has ended, each ``[N]``."""

    @abstractmethod
    def _observation(self, state: Tensor) -> Tensor:
        """The agent's observation in a state, int64 ``[N, D]``."""

    @abstractmethod
    def _optimal_actions(self, state: Tensor, task: Tensor) -> Tensor:
        """The actions of an expert that has the task, bool ``[N, n_actions]``, at least one per row."""

    @abstractmethod
    def optimal_return(self, task: Tensor | None = None) -> Tensor:
        """The largest expected return of an episode, float32 of the shape of ``task``; default the current tasks."""

    @abstractmethod
    def describe_task(self, task: int) -> dict[str, Any]:
        """A task as JSON, with its number as ``"task"``."""

    def describe(self) -> dict[str, Any]:
        """The family as JSON: the environment's class and what its episodes depend on beside task and seed."""
        sizes = {"n_tasks": self.n_tasks, "n_states": self.n_states, "n_actions": self.n_actions}
        return {"env": type(self).__name__, "episode_length": self.episode_length, **sizes}

    # -- what is hidden from the agent ---------------------------------------------------------------------------------

    @property
    def fixed_task(self) -> Tensor | None:
        """The task of each row for all of its episodes, int64 ``[*B]``; None if episodes draw theirs."""
        return None if self._fixed_task is None else self._fixed_task.reshape(self.batch_size)

    @property
    def task(self) -> Tensor:
        """The task of each row, int64 ``[*B]``."""
        if self.fixed_task is None:
            self._begun()
            return self._task.reshape(self.batch_size)
        return self.fixed_task

    @property
    def state(self) -> Tensor:
        """The state of each row, int64 ``[*B]``."""
        return self._begun().reshape(self.batch_size)

    def optimal_actions(self) -> Tensor:
        """The actions in the current states that an expert would choose from, bool ``[*B, n_actions]``."""
        return self._optimal_actions(self._begun(), self.task.reshape(-1)).reshape(*self.batch_size, self.n_actions)

    def _tasks(self, task: Tensor | None) -> Tensor:
        return self.task if task is None else self._task_numbers(task)

    def _task_numbers(self, task: Tensor | int) -> Tensor:
        given = torch.as_tensor(task, device=self.device)
        if given.dtype == torch.bool or given.is_floating_point() or ((given < 0) | (given >= self.n_tasks)).any():
            raise ValueError(f"task must be integers in [0, {self.n_tasks}), got {given}.")
        return given.to(torch.int64)

    # -- TorchRL -------------------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state, name = self._begun(), f"{type(self).__name__}.step()"
        action = read_action(name, tensordict, tuple(self.batch_size), "numbers").reshape(self._n)
        outside = (action < 0) | (action >= self.n_actions)
        expected = f"{name} expects actions in [0, {self.n_actions})"
        if torch.compiler.is_compiling():
            torch._assert_async(~outside.any(), expected)
        elif outside.any():
            raise ValueError(f"{expected}, got {action[outside][:5].tolist()}.")
        live = self._rows_to_step(tensordict)
        following, reward, ended = self._transition(state, action, self.task.reshape(-1))
        self._steps = self._steps + live
        self._rows = torch.where(live, following, state)
        self._terminated = self._terminated | (live & ended)
        self._truncated = self._truncated | (live & ~ended & (self._steps >= self.episode_length))
        return self._observe().set(REWARD, torch.where(live, reward, 0.0).reshape(*self.batch_size, 1))

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        fresh, begun = self._rows_to_reset(tensordict), self._rows is not None
        number = self._number_episodes(fresh)
        # Even counters draw a start, odd ones a task.
        task = random_index(self._key, 2 * number + 1, self.n_tasks) if self._fixed_task is None else self._fixed_task
        start = self._start(number, task)
        new = {"_task": task, "_number": number, "_steps": torch.zeros_like(number)}
        new |= {"_terminated": torch.zeros_like(fresh), "_truncated": torch.zeros_like(fresh), "_rows": start}
        for name, value in new.items():
            setattr(self, name, torch.where(fresh, value, getattr(self, name)) if begun else value)
        return self._observe()

    def _observe(self) -> TensorDict:
        batch, terminated, truncated = self.batch_size, self._terminated.clone(), self._truncated.clone()
        out = {OBSERVATION: self._observation(self._begun()), TERMINATED: terminated, TRUNCATED: truncated}
        out[DONE] = terminated | truncated
        shaped = {key: value.reshape(*batch, *(value.shape[1:] or (1,))) for key, value in out.items()}
        return TensorDict(shaped, batch_size=batch, device=self.device)
