"""BCQ: Q-learning from a fixed dataset among the tokens that its behaviour policy would write."""

from __future__ import annotations

from torchrl_lang.objectives import BCQLoss
from torchrl_lang.recipes.action_values import train_action_values
from torchrl_lang.recipes.algorithms import BCQ
from torchrl_lang.recipes.offline import open_data

__all__ = ["BCQ", "main"]


def main(options: BCQ) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    return train_action_values(
        options,
        open_data(options),
        BCQLoss,
        terms={"threshold": options.threshold},
        guidance={"beta": 1.0, "include_logits": False},
        min_p=options.threshold or None,
        method="greedy",
    )
