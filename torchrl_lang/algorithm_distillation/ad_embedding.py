"""One vector per step: the sum of the embeddings of what the agent reads before it acts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchrl_lang.algorithm_distillation.step_entries import Continuous, Discrete, Entry

__all__ = ["StepEmbedding", "Steps"]


class Steps(NamedTuple):
    """What a model reads at steps of any batch shape ``[*S]``.

    At the first step of a context, position 0, the previous action and reward are not read: there are none.
    """

    observation: Tensor
    """int64 or float ``[*S, D]``."""
    previous_action: Tensor
    """int64 ``[*S]`` or float ``[*S, A]``."""
    previous_reward: Tensor
    """float ``[*S]``."""
    episode_step: Tensor
    """int64 ``[*S]``."""
    position: Tensor
    """int64, broadcasts to ``[*S]``: number of the step in its context, from 0."""

    @classmethod
    def of_windows(cls, observation: Tensor, action: Tensor, reward: Tensor, episode_step: Tensor) -> Steps:
        """The steps of whole contexts, ``[B, L]``, with the action and the reward of each step itself."""
        position = torch.arange(episode_step.shape[1], device=episode_step.device)
        return cls(observation, action.roll(1, 1), reward.roll(1, 1), episode_step, position)


class StepEmbedding(nn.Module):
    """The sum of one embedding per component of the observation, and of previous action and reward, and of two clocks.

    The clocks are the number of the step in its episode and in its context. Each component of a discrete observation
    has a table of its own: in a room, rows and columns, so that a cell shares what was learned about its neighbours.
    All tables are rows of one parameter, and all real numbers are read by one linear map; "none", in place of the
    previous action and reward of a context's first step, is a row of its own and a flag beside the reward.

    Args:
        observation: what an observation is made of.
        action: what an action is made of.
        context: number of positions.
        episode_length: number of steps of an episode.
        width: of the vectors, ``W``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import Discrete
        >>> from torchrl_lang.algorithm_distillation.ad_embedding import StepEmbedding, Steps
        >>> embedding = StepEmbedding(Discrete([7, 7]), Discrete([5]), context=12, episode_length=4, width=8)
        >>> zeros = torch.zeros(3, 12, dtype=torch.int64)
        >>> clock = torch.arange(12)
        >>> embedding(Steps(zeros[..., None].expand(3, 12, 2), zeros, zeros, clock % 4 + zeros, clock)).shape
        torch.Size([3, 12, 8])
    """

    def __init__(self, observation: Entry, action: Entry, *, context: int, episode_length: int, width: int) -> None:
        super().__init__()
        self.observation, self.action = observation, action
        sizes = [*(observation.sizes if isinstance(observation, Discrete) else ())]
        if isinstance(action, Discrete):
            sizes.append(action.sizes[0] + 1)  # the last row is "none"
        sizes += [episode_length, context]
        self.table = nn.Embedding(sum(sizes), width)
        self._first = [sum(sizes[:column]) for column in range(len(sizes))]
        reals = [entry.size for entry in (observation, action) if isinstance(entry, Continuous)]
        self.reals = nn.Linear(sum(reals) + 2, width, bias=False)
        nn.init.normal_(self.table.weight, std=0.5)

    def forward(self, steps: Steps) -> Tensor:
        """The vectors of steps, ``[*S, W]``."""
        shape = steps.episode_step.shape
        position = steps.position.expand(shape)
        is_first = position == 0
        numbers: list[Tensor] = []
        reals = [steps.previous_reward.masked_fill(is_first, 0)[..., None], is_first[..., None]]
        if isinstance(self.observation, Discrete):
            numbers.extend(steps.observation.unbind(-1))
        else:
            reals.append(steps.observation)
        if isinstance(self.action, Discrete):
            numbers.append(steps.previous_action.masked_fill(is_first, self.action.sizes[0]))
        else:
            reals.append(steps.previous_action.masked_fill(is_first[..., None], 0))
        numbers += [steps.episode_step, position]
        # The tables of the components follow each other.
        index = torch.stack([number + first for number, first in zip(numbers, self._first, strict=True)], -1)
        features = torch.cat([value.to(self.reals.weight.dtype) for value in reals], -1)
        return self.table(index).sum(-2) + self.reals(features)
