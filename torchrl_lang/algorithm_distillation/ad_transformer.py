"""The model of algorithm distillation: a causal transformer over the steps of a learning history."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs import EnvBase

from torchrl_lang._checks import at_least_one, check_heads
from torchrl_lang.algorithm_distillation.ad_embedding import StepEmbedding, Steps
from torchrl_lang.algorithm_distillation.ad_heads import ActionHead, OutcomeHead
from torchrl_lang.algorithm_distillation.ad_trunk import ADTrunk
from torchrl_lang.algorithm_distillation.step_entries import Discrete, Entry, describe_entry, entry_of_spec
from torchrl_lang.schema import (
    ACTION,
    ACTION_PARAMETERS,
    EPISODE_STEP,
    OBSERVATION,
    PREDICTED_LOG_PROB,
    PREDICTED_OBSERVATION,
    PREDICTED_REWARD,
    REWARD,
    missing_entry,
)

__all__ = ["ADTransformer"]


class ADTransformer(TensorDictModuleBase):
    r"""Algorithm distillation (AD, arXiv 2210.14215): predict a learner's actions from all that happened before.

    .. math:: P(a_t \mid o_0, a_0, r_0, \dots, o_{t-1}, a_{t-1}, r_{t-1}, o_t)

    One token per step, which is a third of the tokens of separate observations, actions and rewards: the sum of the
    embeddings of the observation, the previous action and reward, the step in its episode and the position in the
    context. From its hidden state follows the action; from that and the action taken follow its reward, the next
    observation and the log-probability that the source algorithm gave to it. A context covers several episodes.

    It reads windows of :class:`~torchrl_lang.algorithm_distillation.HistoryWindows`, ``[*B, L]`` with ``L <=
    context``, and writes, beside them:

    =========================  ========================  ===========================================================
    key                        shape                     meaning
    =========================  ========================  ===========================================================
    ``action_parameters``      ``[*B, L, A or 2 A]``     logits, or means and logarithms of standard deviations
    ``predicted_reward``       ``[*B, L, 1]``            reward of the action
    ``predicted_observation``  ``[*B, L, F]``            next observation: reals, or logits of components side by side
    ``predicted_log_prob``     ``[*B, L]``               log-probability of the action under the source algorithm
    =========================  ========================  ===========================================================

    Args:
        observation: what an observation is made of.
        action: what an action is made of; a discrete one has one component.
        context: the largest number of steps that it reads.
        episode_length: the largest number of steps of an episode.
        width: a multiple of ``heads``.
        layers: number of blocks.
        heads: attention heads.

    Raises:
        ValueError: a number is below 1, ``width`` is not a multiple of ``heads``, a discrete action has several
            components, or the context is shorter than an episode.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, HistoryWindows, LearningHistory
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5)
        >>> source = NoisyExpert(env, 50)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> model = ADTransformer.for_env(env, context=20)
        >>> windows = model(HistoryWindows(history, 20).buffer(batch_size=16).sample())
        >>> windows["action_parameters"].shape, model.get_dist(windows).log_prob(windows["action"]).shape
        (torch.Size([16, 20, 5]), torch.Size([16, 20]))
    """

    in_keys = [OBSERVATION, ACTION, REWARD, EPISODE_STEP]
    out_keys = [ACTION_PARAMETERS, PREDICTED_REWARD, PREDICTED_OBSERVATION, PREDICTED_LOG_PROB]

    def __init__(
        self,
        observation: Entry,
        action: Entry,
        *,
        context: int,
        episode_length: int,
        width: int = 64,
        layers: int = 3,
        heads: int = 4,
    ) -> None:
        super().__init__()
        sizes = {"context": context, "episode_length": episode_length, "width": width, "layers": layers, "heads": heads}
        for name, size in sizes.items():
            at_least_one(name, size)
        check_heads(width, heads)
        if context < episode_length:
            raise ValueError(f"context must cover an episode of {episode_length} steps at least, got {context}.")
        if isinstance(action, Discrete) and len(action.sizes) > 1:
            raise ValueError(f"A discrete action has one component, got sizes={action.sizes}.")
        self.observation, self.action = observation, action
        self.context, self.episode_length, self.width, self.heads = context, episode_length, width, heads
        embedding = StepEmbedding(observation, action, context=context, episode_length=episode_length, width=width)
        self.trunk = ADTrunk(embedding, width=width, layers=layers, heads=heads)
        self._checked = False
        self.action_head, self.outcome_head = ActionHead(width, action), OutcomeHead(width, observation, action)

    @classmethod
    def for_env(cls, env: EnvBase, *, context: int, episode_length: int | None = None, **options: Any) -> ADTransformer:
        """A model for the observations, actions and episodes of an environment.

        Args:
            env: an environment of :mod:`torchrl_lang.envs.grids`, of a
                :class:`~torchrl_lang.algorithm_distillation.sources.GymTask`, or another with such specs.
            context: the largest number of steps that the model reads.
            episode_length: the largest number of steps of an episode; default ``env.episode_length``.
            **options: of the model.

        Raises:
            ValueError: ``episode_length`` is missing, or an entry of the steps is none that a model reads.
        """
        length = getattr(env, "episode_length", None) if episode_length is None else episode_length
        if length is None:
            raise ValueError(f"{type(env).__name__} does not have the length of its episodes: give episode_length.")
        observation = entry_of_spec(env.observation_spec_unbatched[OBSERVATION])
        action = entry_of_spec(env.action_spec_unbatched)
        return cls(observation, action, context=context, episode_length=length, **options)

    def config(self) -> dict[str, Any]:
        """The constructor's arguments as JSON."""
        entries = {"observation": describe_entry(self.observation), "action": describe_entry(self.action)}
        sizes = {"context": self.context, "episode_length": self.episode_length, "width": self.width}
        return {**entries, **sizes, "layers": len(self.trunk.blocks), "heads": self.heads}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the predictions for windows ``[*B, L]``."""
        hidden = self.hidden_states(tensordict)
        outcomes = self.outcome_head(hidden, self.actions(tensordict))
        tensordict.set(ACTION_PARAMETERS, self.action_head(hidden))
        tensordict.set(PREDICTED_REWARD, outcomes.reward[..., None])
        tensordict.set(PREDICTED_OBSERVATION, outcomes.observation)
        return tensordict.set(PREDICTED_LOG_PROB, outcomes.log_prob)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """The distribution of the actions of windows ``[*B, L]``, of that batch shape."""
        return self.action_head.distribution(self.action_head(self.hidden_states(tensordict)))

    def hidden_states(self, tensordict: TensorDictBase) -> Tensor:
        """The hidden states of windows ``[*B, L]``, ``[*B, L, W]``; each depends on its own and earlier steps only.

        Raises:
            KeyError: an entry is missing.
            ValueError: the windows are longer than the context, or an entry has another dtype or shape; in the first
                call also for a number out of range.
            RuntimeError: a number is out of range in a later call, which does not wait for a GPU to read it.
        """
        if missing := [key for key in self.in_keys if tensordict.get(key, None) is None]:
            raise missing_entry(
                type(self).__name__, missing, tensordict, "Sample windows with HistoryWindows.buffer()."
            )
        clock = tensordict.get(EPISODE_STEP)
        batch, length = clock.shape[:-1], clock.shape[-1]
        if length > self.context:
            raise ValueError(f"Windows have at most context={self.context} steps, got {length}.")
        observation = tensordict.get(OBSERVATION).reshape(*clock.shape, -1)
        if not torch.compiler.is_compiling():
            action = tensordict.get(ACTION).reshape(*clock.shape, -1)
            self.check_entries(observation, action, clock, wait=not self._checked)
            self._checked = True
        columns = (observation, self.actions(tensordict), tensordict.get(REWARD).reshape(clock.shape), clock)
        flat = (column.reshape(-1, *column.shape[len(batch) :]) for column in columns)
        hidden, _ = self.trunk(Steps.of_windows(*flat))
        return hidden.reshape(*batch, length, -1)

    def actions(self, tensordict: TensorDictBase) -> Tensor:
        """The actions of windows, int64 ``[*B, L]`` or float ``[*B, L, A]``."""
        shape = tensordict.get(EPISODE_STEP).shape
        return tensordict.get(ACTION).reshape(
            shape if isinstance(self.action, Discrete) else (*shape, self.action.size)
        )

    def check_entries(
        self, observation: Tensor, action: Tensor | None, episode_step: Tensor, *, wait: bool = True
    ) -> None:
        """Check that entries ``[*S, D]`` and steps in episodes ``[*S]`` lie in their ranges.

        Args:
            observation: the observations.
            action: the actions, if there are any.
            episode_step: the numbers of the steps in their episodes.
            wait: for the device. Without it, numbers out of range raise RuntimeError, on a GPU in a later call.

        Raises:
            ValueError: an entry has another dtype or shape, or, with ``wait``, a number is out of range.
        """
        clock = Discrete([self.episode_length])
        given = [(self.observation, OBSERVATION, observation), (clock, EPISODE_STEP, episode_step[..., None])]
        if action is not None:
            given.insert(1, (self.action, ACTION, action))
        for entry, name, value in given:
            (entry.check if wait else entry.check_later)(name, value)
