"""Epsilon-greedy actions, and how their noise decays over a history."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchrl_lang._checks import finite, within
from torchrl_lang._random_stream import RandomStream

__all__ = ["NO_NOISE", "SLOW_DECAY", "LinearDecay", "epsilon_greedy"]


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

    first: float = 1.0
    last: float = 0.0
    fraction: tuple[float, float] = (0.3, 1.0)

    def __post_init__(self) -> None:
        within("first", self.first, 0, 1)
        within("last", self.last, 0, 1)
        low, high = self.fraction
        if not 0 < low <= high <= 1:
            raise ValueError(f"fraction must be an interval in (0, 1], got {self.fraction}.")

    def lengthened(self, factor: float) -> LinearDecay:
        """The same noise at each step in a history that is ``factor`` times as long.

        Args:
            factor: at least 1.

        Raises:
            ValueError: the factor is below 1: a shorter history would end before the decay does.

        Examples:
            >>> from torchrl_lang.algorithm_distillation.sources import LinearDecay
            >>> LinearDecay(fraction=(0.2, 0.6)).lengthened(2).fraction
            (0.1, 0.3)
        """
        finite("factor", factor, low=1)
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

    Args:
        best: the greedy actions, bool ``[N, A]``, at least one per row.
        epsilon: float ``[N]``.
        random: the random numbers; two per row are drawn.

    Returns:
        The actions, int64 ``[N]``, and their log-probabilities, float32 ``[N]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import epsilon_greedy
        >>> from torchrl_lang._random_stream import RandomStream
        >>> best = torch.tensor([[False, True, False], [True, False, True]])
        >>> action, log_prob = epsilon_greedy(best, torch.zeros(2), RandomStream(0))
        >>> action[0].item(), log_prob.exp()
        (1, tensor([1.0000, 0.5000]))
    """
    explores = random.uniform((best.shape[0],)) < epsilon
    action = random.choice(best | explores[:, None])
    is_best = best.gather(-1, action[:, None]).squeeze(-1)
    probability = epsilon / best.shape[-1] + (1 - epsilon) * is_best / best.sum(-1)
    return action, probability.log().to(torch.float32)
