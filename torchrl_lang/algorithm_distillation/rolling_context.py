"""The last steps of several streams, from which whole episodes are evicted where there is no room."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.algorithm_distillation.ad_embedding import Steps
from torchrl_lang.algorithm_distillation.step_entries import Discrete, Entry

__all__ = ["RollingContext"]


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
        >>> from torchrl_lang.algorithm_distillation.rolling_context import RollingContext
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
