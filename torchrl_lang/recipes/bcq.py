"""BCQ: Q-learning from a fixed dataset among the tokens that its behaviour policy would write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchrl_lang.objectives import BCQLoss
from torchrl_lang.recipes.action_values import ActionValueOptions, train_action_values
from torchrl_lang.recipes.offline import open_data
from torchrl_lang.recipes.options import option

__all__ = ["BCQ", "main"]


@dataclass(frozen=True, kw_only=True)
class BCQ(ActionValueOptions):
    """Discrete batch-constrained Q-learning on a dataset (arXiv 1910.01708)."""

    preset: ClassVar[str] = "ilql"
    own_preset: ClassVar[str] = "bcq"

    threshold: float = option(
        0.3, "least probability of a token relative to the likeliest one's, the paper's tau", at_least=0, at_most=1
    )


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
