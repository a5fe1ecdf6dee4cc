"""Source algorithms: learners, on all tasks and streams at once, whose histories a model is trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import Count, NonNegative, Unit, checked
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.grids import HiddenTaskEnv
from torchrl_lang.envs.grids.rooms import RoomEnv
from torchrl_lang.schema import ACTION, ACTION_LOG_PROB, DONE, EPISODE, EPISODE_STEP, OBSERVATION, REWARD, TERMINATED

__all__ = ["LinearDecay", "NoisyExpert", "PosteriorSampling", "QLearning", "TabularSource", "UCB"]


@checked
@dataclass(frozen=True)
class LinearDecay:
    """Noise that falls linearly from ``first`` to ``last`` over a fraction of the history, then stays.

    Args:
        first: the noise of the first step.
        last: the noise after the decay.
        fraction: the interval from which each stream draws the fraction of its history that the decay takes.

    Raises:
        ValueError: a noise does not lie in [0, 1], or ``fraction`` is not an interval in (0, 1].

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import LinearDecay
        >>> decay = LinearDecay(fraction=(0.2, 0.6))
        >>> [decay.at(progress, torch.tensor([0.25, 0.5])).tolist() for progress in (0, 0.125, 0.375)]
        [[1.0, 1.0], [0.5, 0.75], [0.0, 0.25]]
    """

    first: Unit = 1.0
    last: Unit = 0.0
    fraction: tuple[float, float] = (0.3, 1.0)

    def __post_init__(self) -> None:
        low, high = self.fraction
        if not 0 < low <= high <= 1:
            raise ValueError(f"fraction must be an interval in (0, 1], got {self.fraction}.")

    def lengthened(self, factor: float) -> LinearDecay:
        """The same noise at each step in a history that is ``factor`` times as long, at least 1."""
        low, high = self.fraction
        return replace(self, fraction=(low / factor, high / factor))

    def draw(self, streams: int, random: RandomStream) -> Tensor:
        """The fraction of each stream, float64 ``[streams]``."""
        low, high = self.fraction
        return low + (high - low) * random.uniform((streams,))

    def at(self, progress: float, fraction: Tensor) -> Tensor:
        """The noise of each stream after the share ``progress`` of its history, of the shape of ``fraction``."""
        return self.first + (self.last - self.first) * (progress / fraction).clamp_max(1)


SLOW_DECAY = LinearDecay()
"""From 1 to 0 over 30 to 100 % of a history."""
NO_NOISE = LinearDecay(0.0, 0.0)
"""Greedy actions from the first step on."""


def epsilon_greedy(best: Tensor, epsilon: Tensor, random: RandomStream) -> tuple[Tensor, Tensor]:
    r"""Sample :math:`\pi(a) = \epsilon / A + (1 - \epsilon)\, [a \in best] / |best|`.

    The greedy actions ``best``, bool ``[N, A]``, are at least one per row; two random numbers per row are drawn.

    Returns:
        The actions, int64 ``[N]``, and their log-probabilities, float32 ``[N]``.
    """
    explores = random.uniform((best.shape[0],)) < epsilon
    action = random.choice(best | explores[:, None])
    is_best = best.gather(-1, action[:, None]).squeeze(-1)
    probability = epsilon / best.shape[-1] + (1 - epsilon) * is_best / best.sum(-1)
    return action, probability.log().to(torch.float32)


class TabularSource(ABC):
    """Runs the learners of all streams at once on tabular tasks. Abstract: algorithms implement the methods below.

    A stream is one learner's whole life on one task, over many episodes. :meth:`blocks` begins all streams again at
    each call and yields the same history every time: the entries of a
    :class:`~torchrl_lang.algorithm_distillation.LearningHistory`, with log-probabilities.

    Args:
        env: tasks of batch size ``[tasks, streams]``, with one task in each row of it. The source seeds and steps it.
        steps: steps of each stream.
        decay: of the probability of a uniform action; None for none.
        seed: seed of the environment and of the actions.

    Attributes:
        tasks: a description of each task as JSON.
        streams: number of streams of each task.

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

    @checked
    def __init__(self, env: HiddenTaskEnv, steps: Count, *, decay: LinearDecay | None = None, seed: int = 0) -> None:
        tasks = env.fixed_task
        if env.batch_dims != 2 or tasks is None or (tasks != tasks[:, :1]).any():
            found = f"{list(env.batch_size)}: give task=numbers[:, None] and batch_size=[len(numbers), streams]"
            raise ValueError(f"A source needs batch size [tasks, streams] with one task in each row, got {found}.")
        self.tasks = [env.describe_task(number) for number in tasks[:, 0].tolist()]
        self.env, self.steps, self.seed, self.streams = env, steps, seed, env.batch_size[1]
        self.decay = decay
        self._n = env.batch_size.numel()

    @property
    def _device(self) -> torch.device:
        """Where the environment's tensors are, and all of the learners'."""
        return self.env.state.device

    # -- methods of an algorithm ---------------------------------------------------------------------------------------

    settings: tuple[str, ...] = ()
    """Names of the options of the algorithm, which describe its histories."""

    def _begin(self, random: RandomStream) -> None:
        """Begin all streams, ``N = tasks * streams``."""
        ones = torch.ones(self._n, device=self._device)
        self._fraction = ones if self.decay is None else self.decay.draw(self._n, random)

    @abstractmethod
    def _best(self) -> Tensor:
        """The greedy actions, bool ``[N, A]``, at least one per row."""

    @abstractmethod
    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        """Learn from a step: states, action, reward (float32) and whether the task has ended, each ``[N]``."""

    def describe(self) -> dict[str, Any]:
        """Algorithm, options, seed and environment as JSON, for the manifest of a history."""
        settings = {name: getattr(self, name) for name in self.settings}
        if self.decay is not None:
            settings["decay"] = asdict(self.decay)
        return {"algorithm": type(self).__name__, "seed": self.seed, **settings, "env": self.env.describe()}

    # -- the history ---------------------------------------------------------------------------------------------------

    def history(self) -> TensorDict:
        """The whole history in memory, ``[tasks, streams, steps]``."""
        return torch.cat(list(self.blocks()), -1)

    @torch.no_grad()
    @checked
    def blocks(self, length: Count = 200) -> Iterator[TensorDict]:
        """Run all streams on the environment's device and yield their steps, on the CPU.

        Blocks are ``[tasks, streams, length]``; the last one may be shorter. Another kind of device draws other random
        numbers.
        """
        self.env.set_seed(self.seed)
        observed = self.env.reset()
        random = RandomStream(generator=torch.Generator(self._device).manual_seed(self.seed))
        self._begin(random)
        self._episode = torch.zeros(self.env.batch_size, dtype=torch.int64, device=self._device)
        self._episode_step = torch.zeros_like(self._episode)
        for first in range(0, self.steps, length):
            rows: list[TensorDict] = []
            for step in range(first, min(first + length, self.steps)):
                row, observed = self._step(observed, step, random)
                rows.append(row)
            yield torch.stack(rows, -1).cpu()  # histories are kept and sampled on the CPU

    def _step(self, observed: TensorDict, step: int, random: RandomStream) -> tuple[TensorDict, TensorDict]:
        env, shape = self.env, self.env.batch_size
        state, epsilon = env.state.flatten(), torch.zeros(self._n, device=self._device)
        if self.decay is not None:
            epsilon = self.decay.at(step / self.steps, self._fraction)
        action, log_prob = epsilon_greedy(self._best(), epsilon, random)
        following = env.step(TensorDict({ACTION: action.view(shape)}, shape)).get("next")
        outcome = {key: following.get(key) for key in (REWARD, DONE, TERMINATED)}
        self._learn(state, action, outcome[REWARD].flatten(), env.state.flatten(), outcome[TERMINATED].flatten())
        taken = {ACTION: action.view(shape), ACTION_LOG_PROB: log_prob.view(shape)}
        counts = {EPISODE: self._episode, EPISODE_STEP: self._episode_step}
        row = {OBSERVATION: observed.get(OBSERVATION), **taken, **outcome, **counts}
        over = outcome[DONE].squeeze(-1)
        self._episode = self._episode + over
        self._episode_step = torch.where(over, 0, self._episode_step + 1)
        return TensorDict(row, shape), env.maybe_reset(following)


class QLearning(TabularSource):
    r"""Tabular Q-learning (Watkins and Dayan 1992) with epsilon-greedy actions, one table per stream.

    .. math:: Q(s, a) \leftarrow Q(s, a) + \alpha\, (r + \gamma\, (1 - terminated) \max_{a'} Q(s', a') - Q(s, a))

    Tables begin at 0; ties are broken uniformly. A truncated episode bootstraps from its last state. States are those
    of :attr:`~torchrl_lang.envs.grids.HiddenTaskEnv.state`, which may hold more than the observation.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        learning_rate: the ``alpha`` of the formula.
        gamma: the discount.
        decay: how epsilon decays over the history.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 4])
        >>> reward = QLearning(env, 600).history()["reward"].mean((0, 1))
        >>> bool(reward[:100].mean() < 0.3 < 0.8 < reward[-100:].mean())
        True
    """

    settings = ("learning_rate", "gamma")

    @checked
    def __init__(
        self,
        env: HiddenTaskEnv,
        steps: int,
        *,
        learning_rate: Unit = 0.5,
        gamma: Unit = 0.9,
        decay: LinearDecay = SLOW_DECAY,
        seed: int = 0,
    ) -> None:
        super().__init__(env, steps, decay=decay, seed=seed)
        self.learning_rate, self.gamma = learning_rate, gamma

    def _begin(self, random: RandomStream) -> None:
        super()._begin(random)
        self._rows = torch.arange(self._n, device=self._device) * self.env.n_states
        self._table = torch.zeros(self._n * self.env.n_states, self.env.n_actions, device=self._device)

    def _best(self) -> Tensor:
        values = self._table[self._rows + self.env.state.reshape(-1)]
        return values == values.amax(-1, keepdim=True)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        best = torch.where(terminated, 0.0, self._table[self._rows + following].amax(-1))
        place = (self._rows + state) * self.env.n_actions + action
        values = self._table.view(-1)
        before = values[place]
        values[place] = before + self.learning_rate * (reward + self.gamma * best - before)


class UCB(TabularSource):
    r"""UCB1 (Auer, Cesa-Bianchi and Fischer 2002), over all episodes of a stream.

    Each arm is pulled once, in random order; then the arm with the largest

    .. math:: \bar r_a + c \sqrt{2 \ln t / n_a}

    after ``t`` pulls, ``n_a`` of them of arm ``a`` with the mean reward :math:`\bar r_a`. Ties are broken uniformly.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`; ``env`` has one
        state.
        exploration: the ``c`` of the formula; 1 is UCB1.

    Raises:
        ValueError: ``env`` has several states, or ``exploration`` is negative or not finite.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import UCB
        >>> from torchrl_lang.envs.grids import BernoulliBanditEnv
        >>> env = BernoulliBanditEnv(torch.tensor([[0.1, 0.9, 0.1]]), task=0, batch_size=[1, 8])
        >>> action = UCB(env, 200).history()["action"]
        >>> action[..., :3].sort(-1).values.unique(dim=1), bool((action[..., 100:] == 1).float().mean() > 0.7)
        (tensor([[[0, 1, 2]]]), True)
    """

    settings = ("exploration",)

    @checked
    def __init__(self, env: HiddenTaskEnv, steps: int, *, exploration: NonNegative = 1.0, seed: int = 0) -> None:
        super().__init__(env, steps, seed=seed)
        if env.n_states != 1:
            raise ValueError(f"UCB needs a task with one state, a bandit; {type(env).__name__} has {env.n_states}.")
        self.exploration = exploration

    def _begin(self, random: RandomStream) -> None:
        super()._begin(random)
        self._pulls = torch.zeros(self._n, self.env.n_actions, dtype=torch.float64, device=self._device)
        self._earned = torch.zeros_like(self._pulls)

    def _best(self) -> Tensor:
        # Every row has made the same number of pulls.
        bonus = (2 * self._pulls[0].sum().clamp_min(1).log() / self._pulls).sqrt()
        score = self._earned / self._pulls + self.exploration * bonus
        score = torch.where(self._pulls == 0, torch.inf, score)
        return score == score.amax(-1, keepdim=True)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        place = action[:, None]
        self._pulls.scatter_add_(1, place, torch.ones_like(place, dtype=torch.float64))
        self._earned.scatter_add_(1, place, reward[:, None].to(torch.float64))


class NoisyExpert(TabularSource):
    """An optimal policy with uniform noise that decays over the history (arXiv 2312.12275).

    Nothing is trained: the expert has the task and follows a shortest path, or pulls the best arm. Actions that are
    equally good are equally likely. ``LinearDecay(0, 0)`` records the expert alone, the data of expert distillation.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        decay: how the noise decays.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import LinearDecay, NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 2])
        >>> expert = NoisyExpert(env, 20, decay=LinearDecay(0, 0)).history()
        >>> bool((expert["reward"].sum((-2, -1)) == env.optimal_return()).all())
        True
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, decay: LinearDecay = SLOW_DECAY, seed: int = 0) -> None:
        super().__init__(env, steps, decay=decay, seed=seed)

    def _best(self) -> Tensor:
        return self.env.optimal_actions().flatten(0, 1)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        """The expert has nothing to learn."""


class PosteriorSampling(TabularSource):
    """Thompson sampling over the tasks of a family of rooms (posterior sampling, arXiv 1306.0940).

    The learner has the rules of the family, but not its task. It draws a task from those that agree with all rewards
    so far, each equally likely, and acts optimally for it until a reward contradicts it. So it does not search a place
    twice, and its histories show how to search, which those of an expert with noise do not.

    Each step compares every task of the family with every stream, by a table of rewards, bool ``[states *
    actions, tasks]``: 5 MB for the 6,561 tasks of a key and a door in 9 x 9 cells.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        decay: noise that is added, and how it decays over the history.

    Raises:
        ValueError: the environment is not a room: rewards that are random do not rule a task out.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import episode_returns
        >>> from torchrl_lang.algorithm_distillation.sources import PosteriorSampling
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 8])
        >>> returns = episode_returns(PosteriorSampling(env, 200).history(), 10)
        >>> bool((returns[..., -1] == env.optimal_return()).float().mean() > 0.95)
        True
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, decay: LinearDecay = NO_NOISE, seed: int = 0) -> None:
        if not isinstance(env, RoomEnv):
            raise ValueError(f"PosteriorSampling needs a room, whose rewards are not random, got {type(env).__name__}.")
        super().__init__(env, steps, decay=decay, seed=seed)

    def _begin(self, random: RandomStream) -> None:
        super()._begin(random)
        self._random = random
        self._possible = torch.ones(self._n, self.env.n_tasks, dtype=torch.bool, device=self._device)
        self._drawn = random.choice(self._possible)
        sizes = (self.env.n_states, self.env.n_actions, self.env.n_tasks)
        state, action, task = (torch.arange(size, device=self._device) for size in sizes)
        state, action = torch.cartesian_prod(state, action)[..., None].unbind(1)
        # Whether a task rewards an action in a state: a step looks it up, instead of trying all tasks.
        self._rewards = self.env._transition(state, action, task)[1].bool()

    def _best(self) -> Tensor:
        return self.env._optimal_actions(self.env.state.reshape(-1), self._drawn)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        self._possible &= self._rewards[state * self.env.n_actions + action] == reward.bool()[:, None]
        contradicted = ~self._possible.gather(-1, self._drawn[:, None]).squeeze(-1)
        self._drawn[contradicted] = self._random.choice(self._possible, contradicted)
