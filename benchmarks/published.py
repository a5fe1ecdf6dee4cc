"""Offline methods on tasks of LMRL-Gym, beside what was published: ``python -m benchmarks.published``.

Each method decodes in the way that played best on other games. A call trains what is missing in its folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import RESULTS, machine
from benchmarks.wordle_table import NAMES, collect, place, score, score_scripted, summaries
from torchrl_lang._files import write_file
from torchrl_lang.evaluation import format_seed_table
from torchrl_lang.recipes.compare import PlannedRun, planned_runs, run_in_parallel, train_missing


class Setting(NamedTuple):
    """The data and the training of a table."""

    generate: str
    train: dict[str, int | float]
    """Options of all methods."""
    values: dict[str, int | float]
    """Further ones of ILQL and Monte-Carlo returns."""
    ilql: dict[str, int | float]
    """Further ones of ILQL alone."""
    choice_games: int = 250
    report_games: int = 1000


MAZE: dict[str, int | float] = {"qvalue-weight": 1, "value-weight": 1, "beta": 16}
# Moves are certain and most are bad, so V must be near the best of them, not near their mean.
BEST_MOVES: dict[str, int | float] = {"expectile": 0.95, "tau": 0.05}
SHORT: dict[str, int | float] = {"batch-size": 16, "width": 64, "lr": 3e-3, "eval-games": 50}
QUESTIONS: dict[str, int | float] = {"layers": 3, "width": 64, "batch-size": 32, "steps": 6000, "eval-every": 1500}
TASKS: dict[str, Setting] = {
    # With this discount the way matters most near the goal; with the default, 0.99, a seed of three stays at -53.
    "maze": Setting(
        "maze", {**SHORT, "layers": 3, "steps": 4000, "eval-every": 500}, {**MAZE, "turn-gamma": 0.95}, BEST_MOVES
    ),
    "maze-full": Setting(
        "maze --observation full", {**SHORT, "layers": 2, "steps": 3000, "eval-every": 300}, MAZE, BEST_MOVES
    ),
    "cities": Setting("questions --subject cities", QUESTIONS, {}, {"beta": 2}),
    # 233 things, of which a model of width 64 learns little more than how questions are written.
    "things": Setting(
        "questions", {**QUESTIONS, "width": 128, "batch-size": 16, "steps": 12000, "eval-every": 2000}, {}, {"beta": 2}
    ),
}
METHODS = ("BC", "BC best 10 %", "DT", "Monte-Carlo returns", "ILQL")


def run(task: str, folder: Path, methods: Sequence[str], seeds: int) -> None:
    """Make the data of each seed, train and play what is missing."""
    setting = TASKS[task]
    homes = [folder / f"{task}-{seed}" for seed in range(seeds)]
    commands = {
        home.name: ["generate", *setting.generate.split(), "--out", str(home / "data"), "--seed", str(seed)]
        for seed, home in enumerate(homes)
        if not (home / "data").exists()
    }
    run_in_parallel(commands)
    train_missing([each for seed, home in enumerate(homes) for each in planned(setting, home, methods, seed)])
    for seed, home in enumerate(homes):
        score_scripted(setting, home, seed)
        for method in methods:
            score(setting, home, method, seed)


def planned(setting: Setting, home: Path, methods: Sequence[str], seed: int) -> list[PlannedRun]:
    """The runs of a seed."""
    places = {name: home / place(title) for title, name in NAMES.items()}
    shared = {**setting.train, "data": home / "data", "seed": seed}
    further = {"ilql": {**setting.values, **setting.ilql}, "monte-carlo": setting.values}
    runs = planned_runs([NAMES[method] for method in methods], places, shared)
    return [run._replace(options={**run.options, **further.get(run.method, {})}) for run in runs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/published"), help="folder of all runs")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds, each with data of its own (default: 3)")
    options = parser.parse_args(arguments)
    for task in options.tasks:
        run(task, options.out, options.methods, options.seeds)
        returns = {name: found for name, found in dict(collect(options.out))[task].items() if set(found) != {None}}
        returns["optimum"] = returns.pop("optimal (myopic)")
        found = {"machine": machine(), "setting": TASKS[task]._asdict(), "returns": returns}
        write_file(RESULTS / f"published_{task}.json", json.dumps(found, indent=2) + "\n")
        print(f"\n{format_seed_table(summaries(returns), title=f'{task}: return')}", flush=True)


if __name__ == "__main__":
    main()
