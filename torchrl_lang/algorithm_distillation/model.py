"""The model of algorithm distillation: a causal transformer over the steps of a learning history; saving it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs import EnvBase

from torchrl_lang import schema
from torchrl_lang._checks import Count, check_heads, check_options, checked
from torchrl_lang._files import Record, RecordFolder, file_errors, read_weights, write_weights
from torchrl_lang.algorithm_distillation.entries import Continuous, Discrete, Entry, entry_of_spec
from torchrl_lang.algorithm_distillation.network import ActionHead, ADTrunk, OutcomeHead, StepEmbedding, Steps
from torchrl_lang.schema import ACTION, ACTION_PARAMETERS, EPISODE_STEP, OBSERVATION, REWARD, entry


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
    out_keys = [ACTION_PARAMETERS, schema.PREDICTED_REWARD, schema.PREDICTED_OBSERVATION, schema.PREDICTED_LOG_PROB]

    @checked
    def __init__(
        self,
        observation: Entry,
        action: Entry,
        *,
        context: int,
        episode_length: Count,
        width: Count = 64,
        layers: Count = 3,
        heads: Count = 4,
    ) -> None:
        super().__init__()
        check_options(context=(context, episode_length))
        check_heads(width, heads)
        if isinstance(action, Discrete) and len(action.sizes) > 1:
            raise ValueError(f"A discrete action has one component, got sizes={action.sizes}.")
        self.observation, self.action = observation, action
        self.context, self.episode_length = context, episode_length
        self.width, self.layers, self.heads = width, layers, heads
        embedding = StepEmbedding(observation, action, context=context, episode_length=episode_length, width=width)
        self.trunk = ADTrunk(embedding, width=width, layers=layers, heads=heads)
        self._checked = False
        self.action_head, self.outcome_head = ActionHead(width, action), OutcomeHead(width, observation, action)

    @classmethod
    def for_env(cls, env: EnvBase, *, context: int, episode_length: int | None = None, **options: Any) -> ADTransformer:
        """A model for the observations, actions and episodes of an environment.

        Args:
            env: an environment of :mod:`torchrl_lang.envs.grids`, or another with such specs, as of Gymnasium.
            context: the largest number of steps that the model reads.
            episode_length: the largest number of steps of an episode; default ``env.episode_length``.
            **options: of the model.

        Raises:
            ValueError: ``episode_length`` is missing, or an observation or action is of another kind.
        """
        length = getattr(env, "episode_length", 0) if episode_length is None else episode_length
        observation = entry_of_spec(env.observation_spec_unbatched[OBSERVATION])
        action = entry_of_spec(env.action_spec_unbatched)
        return cls(observation, action, context=context, episode_length=length, **options)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the predictions for windows ``[*B, L]``."""
        hidden = self.hidden_states(tensordict)
        outcomes = self.outcome_head(hidden, self.actions(tensordict))
        tensordict.set(ACTION_PARAMETERS, self.action_head(hidden))
        tensordict.set(schema.PREDICTED_REWARD, outcomes.reward[..., None])
        tensordict.set(schema.PREDICTED_OBSERVATION, outcomes.observation)
        return tensordict.set(schema.PREDICTED_LOG_PROB, outcomes.log_prob)

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
        clock = entry(tensordict, EPISODE_STEP)
        batch, length = clock.shape[:-1], clock.shape[-1]
        if length > self.context:
            raise ValueError(f"Windows have at most context={self.context} steps, got {length}.")
        observation = entry(tensordict, OBSERVATION).reshape(*clock.shape, -1)
        if not torch.compiler.is_compiling():
            action = entry(tensordict, ACTION).reshape(*clock.shape, -1)
            self.check_entries(observation, action, clock[..., None], wait=not self._checked)
            self._checked = True
        columns = (observation, self.actions(tensordict), entry(tensordict, REWARD).reshape(clock.shape), clock)
        flat = (column.reshape(-1, *column.shape[len(batch) :]) for column in columns)
        hidden, _ = self.trunk(Steps.of_windows(*flat))
        return hidden.reshape(*batch, length, -1)

    def actions(self, tensordict: TensorDictBase) -> Tensor:
        """The actions of windows, int64 ``[*B, L]`` or float ``[*B, L, A]``."""
        shape = tensordict.get(EPISODE_STEP).shape
        return tensordict[ACTION].reshape(shape if isinstance(self.action, Discrete) else (*shape, self.action.size))

    def check_entries(self, *entries: Tensor | None, wait: bool = True) -> None:
        """Raise unless observations, actions ``[*S, D]`` and steps in episodes ``[*S, 1]`` lie in their ranges."""
        kinds = {OBSERVATION: self.observation, ACTION: self.action, EPISODE_STEP: Discrete([self.episode_length])}
        for (name, kind), value in zip(kinds.items(), entries, strict=True):
            if value is not None and isinstance(kind, Discrete):
                kind.check(name, value, wait=wait)


# -- saved models ------------------------------------------------------------------------------------------------------

_WEIGHTS, _REMEDY = "model.safetensors", "save the model again, or copy the folder again"
_Size = Annotated[int, Field(ge=1, le=1 << 40)]


class _SavedModel(Record):
    """The constructor's arguments of a model, and a description of its training."""

    observation: Discrete | Continuous
    action: Discrete | Continuous
    context: _Size
    episode_length: _Size
    width: _Size
    layers: Annotated[int, Field(ge=1, le=1000)]
    heads: _Size
    trained_on: dict[str, Any]


_FOLDER = RecordFolder(_SavedModel, "ad_model.json", (_WEIGHTS,), remedy=_REMEDY)


def save_ad_model(folder: str | Path, model: ADTransformer, *, trained_on: Mapping[str, Any] | None = None) -> Path:
    """Write a model to a folder, atomically: weights as safetensors, its arguments as JSON, and checksums.

    Args:
        folder: created if it does not exist. A saved model is replaced when the new one is complete; other folders are
            not changed.
        model: the model.
        trained_on: a description of its training as JSON, such as the numbers of the tasks.

    Raises:
        ValueError: some weights are not finite.
        FileExistsError: ``folder`` contains other files than a saved model's.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, Discrete, load_ad_model, save_ad_model
        >>> model = ADTransformer(Discrete([9, 9]), Discrete([5]), context=60, episode_length=20, width=8, heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load_ad_model(save_ad_model(folder, model)).context
        60
    """
    target = Path(folder).resolve()  # replace the folder that a link points to, not the link
    arguments = {name: getattr(model, name) for name in _SavedModel.model_fields if name != "trained_on"}
    with _FOLDER.write(target, _SavedModel(**arguments, trained_on=dict(trained_on or {})), replace=True) as new:
        write_weights(new / _WEIGHTS, model.state_dict(), "model")
    return Path(folder)


def load_ad_model(folder: str | Path) -> ADTransformer:
    """Load a model that :func:`save_ad_model` wrote, on the CPU and in evaluation mode; see there for an example.

    Raises:
        FileError: there is no such model, a file is damaged, or is not what was saved.
    """
    folder = Path(folder)
    saved = _FOLDER.read(folder)
    # On "meta" sizes from a file cannot exhaust the memory.
    with file_errors(folder, "describes no model", _REMEDY, ValueError), torch.device("meta"):
        model = ADTransformer(**{name: value for name, value in saved if name != "trained_on"})
    weights = read_weights(folder / _WEIGHTS, model.state_dict(), "model's", remedy=_REMEDY)
    model.load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
    return model.eval()
