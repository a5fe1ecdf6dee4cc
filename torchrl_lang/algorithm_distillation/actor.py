"""An actor with an algorithm-distillation model, which reads its own interactions, and its rolling context."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_lang._checks import check_options
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.entries import Discrete, Entry
from torchrl_lang.algorithm_distillation.model import ADTransformer
from torchrl_lang.algorithm_distillation.network import KeyValues, Steps
from torchrl_lang.modules.hugging_face import is_stochastic
from torchrl_lang.schema import ACTION, EPISODE_STEP, OBSERVATION, REWARD, entry

__all__ = ["HistoryActor", "RollingContext"]


class HistoryActor(nn.Module):
    """A :class:`~torchrl_lang.algorithm_distillation.ContextPolicy` whose weights do not change: only its context does.

    The context of a stream holds its last steps, across episodes. Where it is full, the oldest episode is evicted and
    the rest is read again, with positions from 0, as in the windows of training. The model reads nothing but the
    context: observations, its own actions and the rewards, which may be on another device.

    With TorchRL's ``set_exploration_type(ExplorationType.DETERMINISTIC)`` actions are the most likely ones.

    Args:
        model: the model.
        context: steps of the context, at least an episode; default those of the model.
        temperature: of the sampled actions: logits are divided by it, standard deviations multiplied. At 0 the most
            likely action is taken; in a room the model then repeats an unsuccessful episode.
        cache: keep keys and values of the context; without it the whole context is read at each step.
        seed: seed of the actions.

    Raises:
        ValueError: ``context`` is shorter than an episode or longer than that of the model, or ``temperature`` is
            negative.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, HistoryActor, evaluate_in_context
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=torch.arange(9), batch_size=[9], episode_length=5)
        >>> actor = HistoryActor(ADTransformer.for_env(env, context=15, width=8, heads=2), seed=0)
        >>> evaluate_in_context(env, actor, episodes=4).shape
        torch.Size([9, 4])
    """

    def __init__(
        self,
        model: ADTransformer,
        *,
        context: int | None = None,
        temperature: float = 1.0,
        cache: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.cache, self.temperature = model, cache, temperature
        self.context = model.context if context is None else context
        covered = f"[{model.episode_length}, {model.context}]"
        check_options(context=(self.context, covered), temperature=(temperature, "[0, inf)"))
        self.random = RandomStream(seed)
        self._steps: RollingContext | None = None
        self._past: list[KeyValues] = []
        self._episode_step: Tensor
        self._action: Tensor | None = None

    def begin(self, streams: int) -> None:
        """Drop all contexts, and begin ``streams`` empty ones."""
        model, device = self.model, self.model.trunk.norm.weight.device
        self._steps = RollingContext(streams, self.context, model.observation, model.action, device=device)
        self._past = model.trunk.empty_past(streams, self.context) if self.cache else []
        self._episode_step, self._action = torch.zeros(streams, dtype=torch.int64, device=device), None

    @torch.no_grad()
    def prompt(self, steps: TensorDictBase) -> None:
        """Begin each context with steps of a demonstration, ``[N, L]``; its next step is the first of an episode.

        Args:
            steps: ``observation``, ``action``, ``reward`` and ``episode_step`` of steps that may be none, a part of an
                episode or several, such as rows of a window.

        Raises:
            RuntimeError: the streams have acted already.
            ValueError: there are other streams, or more steps than the context has room for.
        """
        context = self._begun()
        streams = len(context.length)
        if self._action is not None or bool(context.length.any()):
            raise RuntimeError("prompt() must follow begin(): these streams have steps already.")
        if steps.ndim != 2 or steps.shape[0] != streams or steps.shape[1] > self.context:
            raise ValueError(f"A prompt has shape [{streams}, {self.context} or less], got {list(steps.shape)}.")
        if not steps.shape[1]:
            return
        steps = steps.to(context.length.device)
        observation, action = (entry(steps, key).reshape(*steps.shape, -1) for key in (OBSERVATION, ACTION))
        episode_step = entry(steps, EPISODE_STEP)
        self.model.check_entries(observation, action, episode_step[..., None])
        reward = entry(steps, REWARD).reshape(steps.shape)
        context.fill(observation, self.model.actions(steps), reward, episode_step)
        self._read_again(torch.arange(streams, device=episode_step.device))

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """The next action of each stream, int64 ``[N]`` or float ``[N, A]``, on the device of the observations.

        Raises:
            RuntimeError: there is no :meth:`begin`, or the last action has no outcome.
            ValueError: an observation is out of range, or an episode is longer than those of the model.
        """
        context = self._begun()
        if self._action is not None:
            raise RuntimeError("The last action has no outcome: call observe() before the next act().")
        seen = observation.reshape(len(context.length), -1).to(context.length.device)
        self.model.check_entries(seen, None, self._episode_step[:, None])
        evicted = context.evict()
        context.open(seen, self._episode_step)
        self._action = self._choose(self.model.action_head(self._hidden(context, evicted)))
        return self._action.to(observation.device)

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """The outcome of the last action: rewards, float ``[N]``, and whether episodes ended, bool ``[N]``.

        The model reads where episodes begin, not why they ended, so ``terminated`` is not used.

        Raises:
            RuntimeError: there is no action without an outcome, or a reward is not finite, which all later steps read.
        """
        if self._action is None or not reward.isfinite().all():
            raise RuntimeError("observe() takes finite rewards of the last actions: call act() first.")
        device = self._action.device
        self._begun().close(self._action, reward.to(device))
        self._episode_step = torch.where(done.to(device), 0, self._episode_step + 1)
        self._action = None

    def _begun(self) -> RollingContext:
        if self._steps is None:
            raise RuntimeError("The actor has no streams: call begin() first.")
        return self._steps

    def _hidden(self, context: RollingContext, evicted: Tensor) -> Tensor:
        """Hidden states of the added steps, ``[N, W]``."""
        if self.cache:
            self._read_again(evicted)
            return self.model.trunk.step(context.last(), self._past)
        hidden, _ = self.model.trunk(context.window(int(context.length.max()) + 1))
        return hidden[torch.arange(len(hidden), device=hidden.device), context.length]

    def _read_again(self, streams: Tensor) -> None:
        """Compute the keys and values of streams, int64 ``[R]``, right-padded, in one pass."""
        context = self._begun()
        width = int(context.length[streams].max()) if len(streams) else 0
        if not self.cache or not width:
            return
        _, past = self.model.trunk(context.window(width, streams))
        for kept, new in zip(self._past, past, strict=True):
            kept.keys[streams, :, :width], kept.values[streams, :, :width] = new.keys, new.values

    def _choose(self, parameters: Tensor) -> Tensor:
        """Sample actions at the temperature, or take the most likely ones."""
        head = self.model.action_head
        generator = self.random.generator
        if not (self.temperature and is_stochastic()):
            return parameters.argmax(-1) if head.is_discrete else head.loc_and_scale(parameters)[0]
        if head.is_discrete:
            # The maximum of logits and Gumbel noise is a sample of their softmax.
            noise = -(-self.random.uniform(tuple(parameters.shape)).log()).log()
            return (parameters / self.temperature + noise.to(parameters.device)).argmax(-1)
        loc, scale = head.loc_and_scale(parameters)
        noise = torch.randn(loc.shape, generator=generator, device=generator.device).to(loc.device)
        return loc + self.temperature * scale * noise


class RollingContext:
    """Up to ``context`` steps of each of ``N`` streams, left-aligned, of which the last one may lack its outcome.

    Args:
        streams: ``N``.
        context: steps; at least those of an episode.
        observation: what an observation is made of.
        action: what an action is made of.
        device: of the tensors.

    Attributes:
        length: int64 ``[N]``: the number of steps with an outcome.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import Discrete
        >>> from torchrl_lang.algorithm_distillation.actor import RollingContext
        >>> context = RollingContext(1, 4, Discrete([9]), Discrete([5]))
        >>> for step in range(4):  # two episodes of two steps
        ...     context.open(torch.tensor([[step]]), torch.tensor([step % 2]))
        ...     context.close(torch.tensor([0]), torch.tensor([1.0]))
        >>> context.evict(), context.length
        (tensor([0]), tensor([2]))
        >>> context.window(2).observation
        tensor([[[2],
                 [3]]])
    """

    def __init__(
        self,
        streams: int,
        context: int,
        observation: Entry,
        action: Entry,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self.length = torch.zeros(streams, dtype=torch.int64, device=device)
        self._row = torch.arange(streams, device=device)
        shape = (streams, context)
        self._observation = _empty(shape, observation, device)
        action_column = _empty(shape, action, device)
        self._action = action_column.squeeze(-1) if isinstance(action, Discrete) else action_column
        self._reward = torch.zeros(shape, device=device)
        self._episode_step = torch.zeros(shape, dtype=torch.int64, device=device)

    @property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._observation, self._action, self._reward, self._episode_step

    def fill(self, observation: Tensor, action: Tensor, reward: Tensor, episode_step: Tensor) -> None:
        """Begin all streams with these ``L`` steps, each ``[N, L, ...]``."""
        for column, value in zip(self._columns, (observation, action, reward, episode_step), strict=True):
            column[:, : value.shape[1]] = value
        self.length = torch.full_like(self.length, episode_step.shape[1])

    def open(self, observation: Tensor, episode_step: Tensor) -> None:
        """Add a step to each stream: what is observed ``[N, D]``, and its number in its episode ``[N]``."""
        self._observation[self._row, self.length] = observation.to(self._observation.dtype)
        self._episode_step[self._row, self.length] = episode_step.to(self._episode_step.dtype)

    def close(self, action: Tensor, reward: Tensor) -> None:
        """The actions ``[N, ...]`` of the added steps, and their rewards ``[N]``."""
        self._action[self._row, self.length] = action.to(self._action.dtype)
        self._reward[self._row, self.length] = reward.to(self._reward.dtype)
        self.length = self.length + 1

    def evict(self) -> Tensor:
        """Drop the oldest episode of each stream without room for a step.

        Returns:
            The streams that changed, int64 ``[R]``. The episode in progress is kept, because it is shorter than the
            context; where the only episode filled the context and is over, nothing remains.
        """
        context = self._reward.shape[1]
        changed = (self.length == context).nonzero()[:, 0]
        if len(changed):
            begins = self._episode_step[changed] == 0
            begins[:, 0] = False
            first = torch.where(begins.any(-1), begins.int().argmax(-1), context)
            index = (torch.arange(context, device=first.device) + first[:, None]).clamp_max(context - 1)
            for column in self._columns:
                column[changed] = column[changed[:, None], index]
            self.length[changed] = context - first
        return changed

    def window(self, width: int, streams: Tensor | slice = slice(None)) -> Steps:
        """The first ``width`` steps of some streams, ``[R, width]``; those past a stream's end are padding."""
        return Steps.of_windows(*(column[streams, :width] for column in self._columns))

    def last(self) -> Steps:
        """The steps that were added and have no outcome yet, ``[N]``."""
        row, before = self._row, (self.length - 1).clamp_min(0)
        return Steps(
            self._observation[row, self.length],
            self._action[row, before],
            self._reward[row, before],
            self._episode_step[row, self.length],
            self.length,
        )


def _empty(shape: tuple[int, int], entry: Entry, device: torch.device | str | None) -> Tensor:
    """Zeros for an entry of steps ``[N, C]``, ``[N, C, D]``."""
    if isinstance(entry, Discrete):
        return torch.zeros(*shape, len(entry.sizes), dtype=torch.int64, device=device)
    return torch.zeros(*shape, entry.size, device=device)
