"""The loss of algorithm distillation: the likelihood of a learner's actions, and optionally of what they led to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor
from torch.nn import functional as F
from torchrl.objectives import LossModule

from torchrl_lang._checks import NonNegative, Unit, checked, have_shapes
from torchrl_lang.algorithm_distillation.entries import Discrete
from torchrl_lang.algorithm_distillation.model import ADTransformer
from torchrl_lang.algorithm_distillation.network import Outcomes
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.functional.value_terms import masked_mean
from torchrl_lang.schema import ACTION, ACTION_LOG_PROB, DONE, EPISODE_STEP, OBSERVATION, REWARD, entry


class ADLoss(LossModule):
    r"""Algorithm distillation (AD, arXiv 2210.14215, eq. 2) on windows of learning histories.

    .. math:: L_{action} = -\frac{1}{BL} \sum_{b,t} \log \pi(a_t \mid o_{\le t}, a_{<t}, r_{<t})

    The model may also learn what follows from an action, with a weight for each term:

    - ``loss_reward``: :math:`(\hat r_t - r_t)^2`.
    - ``loss_observation``: of discrete components the sum of :math:`-\log p(o_{t+1})`, of real numbers the sum of
      squares :math:`\|\hat o_{t+1} - o_{t+1}\|^2`. It counts where ``o_{t+1}`` is in the window and in the same
      episode: the step after a done one begins another episode, which no action led to.
    - ``loss_log_prob``: :math:`(\hat\ell_t - \log \mu(a_t))^2`, with the source algorithm's ``action_log_prob``.

    Args:
        model: the model to train.
        label_smoothing: of discrete actions: the share of the target that is uniform over all actions.
        reward_weight: weight of the reward's term; a term of weight zero is not computed.
        observation_weight: weight of the next observation's term.
        log_prob_weight: weight of the log-probability's term.
        reduction: ``"mean"`` over the steps that count, ``"sum"``, or ``"none"`` for one value a step, ``[*B, L]``.

    The input holds ``observation``, ``action``, ``reward`` and ``episode_step`` of windows ``[*B, L]``, with an
    ``observation_weight`` also ``done``, with a ``log_prob_weight`` also ``action_log_prob``; it is left as it was.
    ``loss_mask_key`` may name steps that count. The output holds ``loss_action``, the further terms, each multiplied by
    its weight, and the metrics ``action_nll``, without smoothing, and for discrete actions ``action_accuracy``: the
    share of steps whose action is the most likely one.

    Raises:
        ValueError: a weight is negative, ``label_smoothing`` is not in [0, 1] or continuous actions have one, or
            ``reduction`` is unknown.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import ADLoss, ADTransformer, HistoryWindows, LearningHistory
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5)
        >>> source = NoisyExpert(env, 50)
        >>> windows = HistoryWindows(LearningHistory(source.history(), source.tasks), 20).buffer(batch_size=16)
        >>> loss = ADLoss(ADTransformer.for_env(env, context=20), reward_weight=0.5)
        >>> sorted(loss(windows.sample()).keys())
        ['action_accuracy', 'action_nll', 'loss_action', 'loss_reward']
    """

    @dataclass
    class _AcceptedKeys:
        """Keys that ``set_keys`` can change, with their defaults."""

        observation: NestedKey = OBSERVATION
        action: NestedKey = ACTION
        reward: NestedKey = REWARD
        episode_step: NestedKey = EPISODE_STEP
        done: NestedKey = DONE
        action_log_prob: NestedKey = ACTION_LOG_PROB

    default_keys = _AcceptedKeys
    functional = False  # the model is a module with parameters of its own

    @checked
    def __init__(
        self,
        model: ADTransformer,
        *,
        label_smoothing: Unit = 0.0,
        reward_weight: NonNegative = 0.0,
        observation_weight: NonNegative = 0.0,
        log_prob_weight: NonNegative = 0.0,
        reduction: Literal["mean", "sum", "none"] | None = None,
    ) -> None:
        super().__init__()
        weights = {"reward": reward_weight, "observation": observation_weight, "log_prob": log_prob_weight}
        self.reduction = "mean" if reduction is None else reduction
        if label_smoothing and not isinstance(model.action, Discrete):
            raise ValueError(f"Continuous actions have no label smoothing, got label_smoothing={label_smoothing}.")
        self.model, self.label_smoothing = model, label_smoothing
        self._weights = {name: weight for name, weight in weights.items() if weight}
        metrics = ["action_nll", *(["action_accuracy"] if isinstance(model.action, Discrete) else [])]
        self.out_keys = ["loss_action", *(f"loss_{name}" for name in self._weights), *metrics]

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries that ``forward`` reads, in the order in which it takes them as arguments."""
        return [getattr(self.tensor_keys, name) for name in self._entries]

    @property
    def _entries(self) -> list[str]:
        further = {"observation": DONE, "log_prob": ACTION_LOG_PROB}
        return [*self.model.in_keys, *(key for name, key in further.items() if name in self._weights)]

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value estimator."""

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> NoReturn:
        """Refused with a NotImplementedError: the loss imitates what windows hold and has no value targets."""
        raise NotImplementedError("ADLoss has no value estimators: it imitates what windows hold.")

    def reset_parameters_recursive(self) -> NoReturn:
        """Refused with a NotImplementedError: a model draws its weights when it is built."""
        raise NotImplementedError("ADLoss does not initialize the weights of its model: build the model again.")

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of windows, whose numbers must be finite, as those of a :class:`LearningHistory` are.

        Raises:
            KeyError: an entry is missing.
            ValueError: the log-probabilities have another shape than the windows; see also
                :meth:`ADTransformer.hidden_states`.
        """
        windows = TensorDict({name: entry(tensordict, getattr(self.tensor_keys, name)) for name in self._entries})
        hidden = self.model.hidden_states(windows)
        counted = self._counted(tensordict, hidden[..., 0])
        out = self._action_terms(windows, upcast_half(self.model.action_head(hidden)), counted)
        if self._weights:
            predicted = self.model.outcome_head(hidden, self.model.actions(windows))
            outcomes = Outcomes(*map(upcast_half, predicted))
            for name, weight in self._weights.items():
                values, counts = getattr(self, f"_{name}_term")(windows, outcomes, counted)
                out[f"loss_{name}"] = weight * self._reduced(values, counts)
        return TensorDict({key: out[key] for key in self.out_keys})

    def _counted(self, tensordict: TensorDictBase, like: Tensor) -> Tensor:
        """Bool ``[*B, L]``: steps that count."""
        counted = torch.ones_like(like, dtype=torch.bool)
        for key in self._loss_mask_keys():
            if (mask := tensordict.get(key, None)) is not None:
                counted = counted & self._expand_loss_mask(mask, like)
        return counted

    def _action_terms(self, windows: TensorDictBase, parameters: Tensor, counted: Tensor) -> dict[str, Tensor]:
        action, head = self.model.actions(windows), self.model.action_head
        nll = -head.distribution(parameters).log_prob(action)
        out = {"loss_action": self._reduced(nll, counted), "action_nll": masked_mean(nll.detach(), counted)}
        if self.label_smoothing:
            uniform = -parameters.log_softmax(-1).mean(-1)
            smoothed = (1 - self.label_smoothing) * nll + self.label_smoothing * uniform
            out["loss_action"] = self._reduced(smoothed, counted)
        if head.is_discrete:
            out["action_accuracy"] = masked_mean((parameters.argmax(-1) == action).to(nll.dtype), counted)
        return out

    def _reward_term(self, windows: TensorDictBase, outcomes: Outcomes, counted: Tensor) -> tuple[Tensor, Tensor]:
        return (outcomes.reward - windows.get(REWARD).reshape(counted.shape)).square(), counted

    def _log_prob_term(self, windows: TensorDictBase, outcomes: Outcomes, counted: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = windows.get(ACTION_LOG_PROB)
        have_shapes((f"'{ACTION_LOG_PROB}'", log_prob, counted.shape))
        return (outcomes.log_prob - log_prob).square(), counted

    def _observation_term(self, windows: TensorDictBase, outcomes: Outcomes, counted: Tensor) -> tuple[Tensor, Tensor]:
        following = windows.get(OBSERVATION).reshape(*counted.shape, -1).roll(-1, -2)
        follows = ~windows.get(DONE).reshape(counted.shape)
        follows[..., -1] = False
        if not isinstance(self.model.observation, Discrete):
            return (outcomes.observation - following).square().sum(-1), counted & follows
        parts = outcomes.observation.split(list(self.model.observation.sizes), -1)
        pairs = zip(parts, following.unbind(-1), strict=True)
        terms = [F.cross_entropy(part.flatten(0, -2), target.flatten(), reduction="none") for part, target in pairs]
        return torch.stack(terms).sum(0).view(counted.shape), counted & follows

    def _reduced(self, values: Tensor, counted: Tensor) -> Tensor:
        if self.reduction == "mean":
            return masked_mean(values, counted)
        values = torch.where(counted, values, 0)  # not multiplied: a masked value may be infinite
        return values.sum() if self.reduction == "sum" else values
