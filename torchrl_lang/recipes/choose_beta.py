"""Choose the weight of a run's values on games that no result is reported on."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang.recipes.load_run import FinishedRun

__all__ = ["BETAS", "choose_beta"]

BETAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""The weights that are tried."""


def choose_beta(run: FinishedRun, *, seed: int, games: int = 250, betas: Sequence[float] = BETAS) -> dict[float, float]:
    """Play games greedily with each weight of the values.

    Args:
        run: a finished run with values.
        seed: of the games; give another one than that of the games that are reported.
        games: number of games for each weight.
        betas: the weights to try.

    Returns:
        The mean return of each weight, the best one first; of equal ones the smaller weight.

    Raises:
        ValueError: the run has no values.
    """
    returns = {}
    for beta in sorted(betas):
        summary, _ = run.task.evaluate(run.policy(beta, method="greedy"), games=games, seed=seed)
        returns[beta] = summary.mean_return
    return dict(sorted(returns.items(), key=lambda item: -item[1]))
