"""CQL: Q-learning from a fixed dataset that lowers the values of tokens that the data do not take."""

from __future__ import annotations

from torchrl_lang.objectives import CQLLoss
from torchrl_lang.recipes.action_values import train_action_values
from torchrl_lang.recipes.algorithms import CQL
from torchrl_lang.recipes.offline import open_data

__all__ = ["CQL", "main"]


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
