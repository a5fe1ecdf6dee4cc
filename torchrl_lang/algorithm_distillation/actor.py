"""An actor with an algorithm-distillation model, which reads its own interactions."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.entries import Discrete, Entry
from torchrl_lang.algorithm_distillation.model import ADTransformer
from torchrl_lang.algorithm_distillation.network import KeyValues, Steps
from torchrl_lang.algorithm_distillation.rolling_context import RollingContext, StreamPolicy
from torchrl_lang.modules.hugging_face import is_stochastic
from torchrl_lang.schema import ACTION, EPISODE_STEP, OBSERVATION, REWARD, entry


class HistoryActor(StreamPolicy):
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
        self._past: list[KeyValues] = []
        self._action: Tensor

    def begin(self, streams: int) -> None:
        """Drop all contexts, and begin ``streams`` empty ones."""
        model, device, shape = self.model, self.model.trunk.norm.weight.device, (streams, self.context)
        observation, action = (_zeros(kind, shape, device) for kind in (model.observation, model.action))
        action = action.squeeze(-1) if isinstance(model.action, Discrete) else action
        entries = {OBSERVATION: observation, ACTION: action, REWARD: torch.zeros(shape, device=device)}
        self._begin(RollingContext(entries))
        self._past = model.trunk.empty_past(*shape) if self.cache else []

    def _read_prompt(self, context: RollingContext, steps: TensorDictBase) -> None:
        if steps.shape[1] > self.context:
            raise ValueError(f"A prompt has at most context={self.context} steps, got {steps.shape[1]}.")
        steps = steps.to(context.length.device)
        observation, action = (entry(steps, key).reshape(*steps.shape, -1) for key in (OBSERVATION, ACTION))
        number = entry(steps, EPISODE_STEP)
        self.model.check_entries(observation, action, number[..., None])
        reward = entry(steps, REWARD).reshape(steps.shape)
        read = {OBSERVATION: observation, ACTION: self.model.actions(steps), REWARD: reward, EPISODE_STEP: number}
        for key, value in read.items():
            context.steps.get(key)[:, : steps.shape[1]] = value
        context.length += steps.shape[1]
        self._read_again(context, context.row)

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """The next action of each stream, int64 ``[N]`` or float ``[N, A]``, on the device of the observations.

        Raises:
            RuntimeError: there is no :meth:`begin`, or the last action has no outcome.
            ValueError: an observation is out of range, or an episode is longer than those of the model.
        """
        context = self._after("begin", "prompt", "observe")
        seen = observation.reshape(len(context.length), -1).to(context.length.device)
        self.model.check_entries(seen, None, context.clock[:, None])
        place = torch.arange(self.context + 1, device=seen.device)
        evicted = context.evict((place > 0) | (context.length < self.context)[:, None])
        context.write(observation=seen)
        self._action = self._choose(self.model.action_head(self._hidden(context, evicted)))
        self._last_call = "act"
        return self._action.to(observation.device)

    def observe(self, reward: Tensor, done: Tensor, terminated: Tensor | None = None) -> None:
        """The outcome of the last action: rewards, float ``[N]``, and whether episodes ended, bool ``[N]``.

        The model reads where episodes begin, not why they ended, so ``terminated`` is not used.

        Raises:
            RuntimeError: there is no action without an outcome.
            ValueError: a reward is not finite, which all later steps read.
        """
        context = self._after("act")
        if not reward.isfinite().all():
            raise ValueError(f"observe() takes finite rewards, got {reward[~reward.isfinite()][0]}.")
        context.write(action=self._action, reward=reward)
        context.close(done)
        self._last_call = "observe"

    def _hidden(self, context: RollingContext, evicted: Tensor) -> Tensor:
        """Hidden states of the added steps, ``[N, W]``."""
        row, length = context.row, context.length
        if not self.cache:
            hidden, _ = self.model.trunk(self._window(context, int(length.max()) + 1))
            return hidden[row, length]
        self._read_again(context, evicted)
        observation, action, reward, number = (context.steps.get(key) for key in self.model.in_keys)
        before = (length - 1).clamp_min(0)
        last = Steps(observation[row, length], action[row, before], reward[row, before], number[row, length], length)
        return self.model.trunk.step(last, self._past)

    def _read_again(self, context: RollingContext, streams: Tensor) -> None:
        """Compute the keys and values of streams, int64 ``[R]``, right-padded, in one pass."""
        width = int(context.length[streams].max()) if len(streams) else 0
        if not self.cache or not width:
            return
        _, past = self.model.trunk(self._window(context, width, streams))
        for kept, new in zip(self._past, past, strict=True):
            kept.keys[streams, :, :width], kept.values[streams, :, :width] = new.keys, new.values

    def _window(self, context: RollingContext, width: int, streams: Tensor | slice = slice(None)) -> Steps:
        """The first ``width`` steps of some streams, ``[R, width]``; those past a stream's end are padding."""
        return Steps.of_windows(*(context.steps.get(key)[streams, :width] for key in self.model.in_keys))

    def _choose(self, parameters: Tensor) -> Tensor:
        """Sample actions at the temperature, or take the most likely ones."""
        head, generator = self.model.action_head, self.random.generator
        if not (self.temperature and is_stochastic()):
            return parameters.argmax(-1) if head.is_discrete else head.loc_and_scale(parameters)[0]
        if head.is_discrete:
            # The maximum of logits and Gumbel noise is a sample of their softmax.
            noise = -(-self.random.uniform(tuple(parameters.shape)).log()).log()
            return (parameters / self.temperature + noise.to(parameters.device)).argmax(-1)
        loc, scale = head.loc_and_scale(parameters)
        noise = torch.randn(loc.shape, generator=generator, device=generator.device).to(loc.device)
        return loc + self.temperature * scale * noise


def _zeros(entry: Entry, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Zeros for an entry of steps ``[N, C]``, ``[N, C, D]``."""
    if isinstance(entry, Discrete):
        return torch.zeros(*shape, len(entry.sizes), dtype=torch.int64, device=device)
    return torch.zeros(*shape, entry.size, device=device)
