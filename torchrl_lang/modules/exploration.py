"""Whether policies draw their actions or take the likeliest, as TorchRL's ``set_exploration_type`` says."""

from __future__ import annotations

from torchrl.envs.utils import ExplorationType, exploration_type

__all__ = ["draws"]

_WITHOUT_CHANCE = (ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN)


def draws() -> bool:
    """Whether actions are left to chance here.

    Examples:
        >>> from torchrl.envs.utils import ExplorationType, set_exploration_type
        >>> from torchrl_lang.modules.exploration import draws
        >>> with set_exploration_type(ExplorationType.DETERMINISTIC):
        ...     draws()
        False
    """
    return exploration_type() not in _WITHOUT_CHANCE
