"""Commands on finished runs: their options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.recipes.algorithms.training import DeviceOptions, TaskOptions
from torchrl_lang.recipes.options import option, required, with_defaults

BETAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Weights of the values that :meth:`FinishedRun.choose_beta` tries."""


@with_defaults(device="cpu")
class Evaluate(TaskOptions, DeviceOptions, group="evaluation", preset="evaluate", task_from=("run", "config.json")):
    """Evaluate a finished run on its task, beside the task's scripted players."""

    run: Path = required("folder of a finished run")
    also: tuple[Path, ...] = option((), "further runs on the same games, such as the initial policy of this one")
    games: int | None = option(
        None, "number of games; none: 1000, or a split's games once (five times where actions are sampled)", ge=1
    )
    split: str | None = option(None, "games of which split; none: the task's own choice")
    beta: tuple[float | Literal["auto"], ...] = option(
        (0.0, 2.0, 4.0),
        "weights of the values, for runs that have values; auto: the best of 1, 2, 4, 8 and 16 on 250 other games. "
        "Runs of bcq and psi play by their values alone, with weight 1",
        ge=0,
    )
    method: Literal["sample", "greedy", "beam", "best_of"] | None = option(
        None, "decoding method; none: greedy, and without values sampling as well"
    )
    candidates: int = option(8, "samples for each utterance of best_of, which plays the one of highest value", ge=1)
    seed: int = option(2_000_000, "seed of games and sampling; training evaluates on games of its seed + 1", ge=0)
    plots: bool = option(False, "draw a histogram of the turns needed (needs matplotlib)")


@dataclass(frozen=True, kw_only=True)
class ConvertAgileRL(TaskOptions, group="data", task_from=("data", "manifest.json")):
    """Make a finished run of an agent that AgileRL's ILQL trained."""

    source: Path = required("folder of the agent, written by torchrl_lang/modules/agilerl/export.py beside AgileRL")
    data: Path = required("folder of a dataset of the agent's task, with the agent's tokens, see `generate`")
    out: Path = required("folder of the run, which does not exist yet")
