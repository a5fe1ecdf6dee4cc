"""Policies that act in several streams at once: the protocol of in-context evaluation, and two baselines."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.grids import HiddenTaskEnv

__all__ = ["ContextPolicy", "OptimalPolicy", "PromptablePolicy", "RandomPolicy"]


@runtime_checkable
class ContextPolicy(Protocol):
    """Acts in ``N`` streams at once, with the interactions in each as its only input.

    After :meth:`begin`, calls of :meth:`act` and :meth:`observe` alternate. Streams end their episodes at different
    steps; the observation after a done step is the first of the next episode.
    """

    def begin(self, streams: int) -> None:
        """Drop all contexts, and begin ``N = streams`` empty ones."""

    def act(self, observation: Tensor) -> Tensor:
        """The next action of each stream, ``[N, ...]``, for observations ``[N, ...]``."""

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """The outcome of the last action.

        Args:
            reward: float32 ``[N]``.
            done: bool ``[N]``, whether episodes ended.
            terminated: bool ``[N]``, whether they ended because the task did, if that is known.
        """


@runtime_checkable
class PromptablePolicy(ContextPolicy, Protocol):
    """A :class:`ContextPolicy` whose contexts may begin with steps that others took."""

    def prompt(self, steps: TensorDictBase) -> None:
        """Begin each context with steps of a demonstration, ``[N, L]``; its next step is the first of an episode."""


class RandomPolicy(torch.nn.Module):
    """Uniform actions: what a policy earns without any information.

    Args:
        n_actions: number of actions.
        seed: seed of the actions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import RandomPolicy
        >>> policy = RandomPolicy(5, seed=0)
        >>> policy.begin(3)
        >>> policy.act(torch.zeros(3, 2)).shape
        torch.Size([3])
    """

    def __init__(self, n_actions: int, *, seed: int | None = None) -> None:
        super().__init__()
        at_least_one("n_actions", n_actions)
        self.n_actions, self.random = n_actions, RandomStream(seed)

    def begin(self, streams: int) -> None:
        """Nothing is stored."""

    def act(self, observation: Tensor) -> Tensor:
        """Uniform actions, int64 ``[N]``."""
        return self.random.below(torch.full(observation.shape[:1], self.n_actions, device=observation.device))

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """Nothing is stored."""


class OptimalPolicy(torch.nn.Module):
    """An expert that reads the hidden task of the environment: what can be earned at most.

    Args:
        env: the environment in which it is evaluated.
        seed: seed of the choice among equally good actions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import OptimalPolicy, evaluate_in_context
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25), batch_size=[25])
        >>> returns = evaluate_in_context(env, OptimalPolicy(env), episodes=2)
        >>> bool((returns == env.optimal_return()[:, None]).all())
        True
    """

    def __init__(self, env: HiddenTaskEnv, *, seed: int | None = None) -> None:
        super().__init__()
        self._env = [env]  # in a list, so that its buffers do not become the policy's
        self.random = RandomStream(seed)

    def begin(self, streams: int) -> None:
        """Nothing is stored."""

    def act(self, observation: Tensor) -> Tensor:
        """One of the optimal actions in the environment's current states, int64 ``[N]``."""
        (env,) = self._env
        return self.random.choice(env.optimal_actions().reshape(-1, env.n_actions))

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """Nothing is stored."""
