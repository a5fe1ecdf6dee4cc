"""Heads of an algorithm-distillation model: the action, and what the action led to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn import functional as F

from torchrl_lang.algorithm_distillation.step_entries import Discrete, Entry

__all__ = ["ActionHead", "OutcomeHead", "Outcomes"]

_LOG_STD = (-5.0, 2.0)


class ActionHead(nn.Module):
    """The distribution of the action, from the hidden state of its step.

    A discrete action has logits ``[*S, A]``; a continuous one independent normal distributions, whose means and
    logarithms of the standard deviations, limited to [-5, 2], are ``[*S, 2 A]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import Continuous
        >>> from torchrl_lang.algorithm_distillation.ad_heads import ActionHead
        >>> head = ActionHead(8, Continuous(2))
        >>> head.distribution(head(torch.randn(3, 8))).sample().shape
        torch.Size([3, 2])
    """

    def __init__(self, width: int, action: Entry) -> None:
        super().__init__()
        self.is_discrete = isinstance(action, Discrete)
        self.out = nn.Linear(width, action.sizes[0] if isinstance(action, Discrete) else 2 * action.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """The parameters of the distribution, of hidden states ``[*S, W]``."""
        return self.out(hidden)

    def distribution(self, parameters: Tensor) -> Distribution:
        """The distribution with these parameters, of batch shape ``[*S]``.

        It does not check its parameters: on a GPU each check waits for the device.
        """
        if self.is_discrete:
            return Categorical(logits=parameters, validate_args=False)
        loc, scale = self.loc_and_scale(parameters)
        return Independent(Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def loc_and_scale(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of continuous actions, each ``[*S, A]``."""
        loc, log_std = parameters.chunk(2, -1)
        return loc, log_std.clamp(*_LOG_STD).exp()


class Outcomes(NamedTuple):
    """Predictions of what an action leads to."""

    reward: Tensor
    """``[*S]``."""
    log_prob: Tensor
    """``[*S]``: log-probability of the action under the source algorithm."""
    observation: Tensor
    """The next observation: ``[*S, D]``, or the logits of its discrete components side by side."""


class OutcomeHead(nn.Module):
    """Reward, log-probability and next observation, from the hidden state of a step and its action.

    One hidden layer, because what an action leads to depends on both together.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import Discrete
        >>> from torchrl_lang.algorithm_distillation.ad_heads import OutcomeHead
        >>> head = OutcomeHead(8, Discrete([7, 7]), Discrete([5]))
        >>> head(torch.randn(3, 8), torch.tensor([0, 4, 2])).observation.shape
        torch.Size([3, 14])
    """

    def __init__(self, width: int, observation: Entry, action: Entry) -> None:
        super().__init__()
        self.action: nn.Module
        if isinstance(action, Discrete):
            self.action = nn.Embedding(action.sizes[0], width)
        else:
            self.action = nn.Linear(action.size, width)
        self.hidden = nn.Linear(width, width)
        self.reward_and_log_prob = nn.Linear(width, 2)
        self.observation = nn.Linear(
            width, sum(observation.sizes) if isinstance(observation, Discrete) else observation.size
        )

    def forward(self, hidden: Tensor, action: Tensor) -> Outcomes:
        """The predictions of hidden states ``[*S, W]`` and actions, int64 ``[*S]`` or float ``[*S, A]``."""
        mixed = F.relu(self.hidden(hidden) + self.action(action))
        reward, log_prob = self.reward_and_log_prob(mixed).unbind(-1)
        return Outcomes(reward, log_prob, self.observation(mixed))
