"""CQL: Q-learning from a fixed dataset that lowers the values of tokens that the data do not take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchrl_lang.objectives import CQLLoss
from torchrl_lang.recipes.action_values import ActionValueOptions, train_action_values
from torchrl_lang.recipes.offline import open_data
from torchrl_lang.recipes.options import option

__all__ = ["CQL", "main"]


@dataclass(frozen=True, kw_only=True)
class CQL(ActionValueOptions):
    """Conservative Q-learning on a dataset (arXiv 2006.04779)."""

    preset: ClassVar[str] = "ilql"
    own_preset: ClassVar[str] = "cql"

    beta: float = option(4.0, "weight of the values in the policy that is evaluated during training", at_least=0)
    cql_weight: float = option(0.1, "weight of the CQL term, the paper's alpha", at_least=0)


def main(options: CQL) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    return train_action_values(
        options,
        open_data(options),
        CQLLoss,
        terms={"cql_weight": options.cql_weight},
        guidance={"beta": options.beta},
        method="greedy",
    )
