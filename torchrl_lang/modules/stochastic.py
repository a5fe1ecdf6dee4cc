"""Whether policies sample their actions or decode greedily, by TorchRL's ``set_exploration_type``."""

from __future__ import annotations

from torchrl.envs.utils import ExplorationType, exploration_type

__all__ = ["is_stochastic"]

_WITHOUT_CHANCE = (ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN)


def is_stochastic() -> bool:
    """Whether policies sample their actions here.

    Examples:
        >>> from torchrl.envs.utils import ExplorationType, set_exploration_type
        >>> from torchrl_lang.modules.stochastic import is_stochastic
        >>> with set_exploration_type(ExplorationType.DETERMINISTIC):
        ...     is_stochastic()
        False
    """
    return exploration_type() not in _WITHOUT_CHANCE
