"""Policies that act in several streams at once: their protocol, with a demonstration, and two baselines."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang._checks import Count, checked
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.grids import HiddenTaskEnv


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


class PromptedPolicy(nn.Module):
    """A policy that begins each stream with the steps of a demonstration.

    Args:
        actor: the policy, such as a :class:`HistoryActor`.
        steps: ``[N, L]``, see :meth:`HistoryActor.prompt`; every :meth:`begin` has ``N`` streams.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, HistoryActor
        >>> from torchrl_lang.algorithm_distillation import PromptedPolicy, evaluate_in_context
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 2], episode_length=6)
        >>> actor = HistoryActor(ADTransformer.for_env(env, context=18, width=8, heads=2), seed=0)
        >>> policy = PromptedPolicy(actor, NoisyExpert(env, steps=3).history().flatten(0, 1))
        >>> evaluate_in_context(env, policy, episodes=4).shape
        torch.Size([9, 2, 4])
    """

    def __init__(self, actor: PromptablePolicy, steps: TensorDictBase) -> None:
        super().__init__()
        self.actor, self._steps = actor, steps

    def begin(self, streams: int) -> None:
        """Begin each context with its steps."""
        self.actor.begin(streams)
        self.actor.prompt(self._steps)

    def act(self, observation: Tensor) -> Tensor:
        """See :meth:`ContextPolicy.act`."""
        return self.actor.act(observation)

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """See :meth:`ContextPolicy.observe`."""
        self.actor.observe(reward, done, terminated)


class _WithoutContext(nn.Module):
    """A policy that keeps nothing of what happened."""

    def begin(self, streams: int) -> None:
        """Nothing is stored."""

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """Nothing is stored."""


class RandomPolicy(_WithoutContext):
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

    @checked
    def __init__(self, n_actions: Count, *, seed: int | None = None) -> None:
        super().__init__()
        self.n_actions, self.random = n_actions, RandomStream(seed)

    def act(self, observation: Tensor) -> Tensor:
        """Uniform actions, int64 ``[N]``."""
        return self.random.below(torch.full(observation.shape[:1], self.n_actions, device=observation.device))


class OptimalPolicy(_WithoutContext):
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

    def act(self, observation: Tensor) -> Tensor:
        """One of the optimal actions in the environment's current states, int64 ``[N]``."""
        (env,) = self._env
        return self.random.choice(env.optimal_actions().reshape(-1, env.n_actions))
