"""Online methods from one start, with one budget of processor time a run: ``python -m benchmarks.online_table``.

Every method begins with the same BC run and trains as many iterations as the budget allows: short runs measure them.
A call trains what is missing in its folder. Each run has one thread, and as many run at a time as there are cores. The
picture has the returns by games and by processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from benchmarks.common import RESULTS, machine
from benchmarks.seed_figure import draw_learning
from torchrl_lang._files import write_file
from torchrl_lang.evaluation import format_seed_table, over_seeds
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.recipes.algorithms import ALGORITHMS
from torchrl_lang.recipes.algorithms.online import RatioOptions
from torchrl_lang.recipes.compare import run_in_parallel
from torchrl_lang.recipes.load_run import load_run


class Task(NamedTuple):
    """The games of a table, and the start of all methods."""

    generate: str
    bc: str
    train: str = ""
    """Options of all methods."""
    own: str | None = None
    """The environment, of a task that does not come with the library."""

    def given(self) -> list[str]:
        """The words of a command that name an own task."""
        return ["--task", self.own] if self.own else []


BLACKJACK = "benchmarks.suite_games:blackjack_env"
NO_KL = "--kl-coef 0 --kl-target none"
TASKS: dict[str, Task] = {
    "wordle": Task("wordle --words 50 --games 20000", "--steps 1500", NO_KL),
    "maze": Task("maze --skill 0.3", "", NO_KL),
    "maze-full": Task("maze --observation full --skill 0.3", "", NO_KL),
    "blackjack": Task(
        f"{BLACKJACK} --player benchmarks.suite_games:gamble --games 4000", "--steps 600 --layers 2", NO_KL, BLACKJACK
    ),
}
METHODS: dict[str, str] = {
    "PPO": "ppo",
    "PPO, turns": "turn-ppo",
    "GRPO": "grpo",
    "Dr. GRPO": "dr-grpo",
    "RLOO": "rloo",
    "REINFORCE++": "reinforce++",
    "DAPO": "dapo",
    "GSPO": "gspo",
    "CISPO": "cispo",
    "GiGPO": "gigpo",
    "ArCHer": "archer",
    "rejection sampling": "rejection",
}
TRIAL = 6
"""Iterations that are timed."""
MOST = 0.7
"""Share of the budget that a run takes at least."""
REPORT = 2_000_000
"""Seed of the games that are reported; the training's is added."""


def run(folder: Path, task: str, methods: Sequence[str], seeds: int, *, minutes: float, games: int) -> dict[str, Any]:
    """Train and play what is missing of a task; returns and curves of the methods by seed."""
    chosen = TASKS[task]
    start = make_start(folder, chosen)
    numbers = lengths(folder, chosen, methods, start, minutes)
    runs = [(seed, place(folder, method, numbers[method], seed)) for seed in range(seeds) for method in methods]
    _train({out: _command(chosen, start, out) for _, out in runs})
    scored = [
        (start, folder / "start.json", games, 0, chosen.own),
        *((out, out / "score.json", games, seed, chosen.own) for seed, out in runs),
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        begins, *_ = pool.map(score, *zip(*scored, strict=True))
    found = {
        method: [_result(place(folder, method, numbers[method], seed)) for seed in range(seeds)] for method in methods
    }
    return {"start": begins, "methods": found}


def lengths(folder: Path, task: Task, methods: Sequence[str], start: Path, minutes: float) -> dict[str, int]:
    """Iterations of a run of each method.

    They begin with those of a short trial. The first run is repeated with more until it takes most of the budget,
    because games become shorter as a policy learns.
    """
    trials = {method: place(folder, method, TRIAL, "trial") for method in methods}
    _train({out: _command(task, start, out) for out in trials.values()})
    numbers = {method: iterations(out, minutes) for method, out in trials.items()}
    short = set(methods)
    while short:
        first = {method: place(folder, method, numbers[method], 0) for method in methods if method in short}
        _train({out: _command(task, start, out) for out in first.values()})
        spent = {method: sum(_log(out)["seconds"]) / 60 for method, out in first.items()}
        short = {method for method, taken in spent.items() if taken < MOST * minutes}
        numbers |= {method: round(numbers[method] * minutes / spent[method]) for method in short}
    return numbers


def make_start(folder: Path, task: Task) -> Path:
    """The BC run that all methods begin with."""
    data, bc = folder / "data", folder / "bc"
    if not (bc / "model").exists():
        run_in_parallel({"data": ["generate", *task.generate.split(), "--out", str(data)]})
        run_in_parallel({"bc": ["train", "bc", "--data", str(data), "--out", str(bc), *task.given(), *task.bc.split()]})
    return bc


def place(folder: Path, method: str, number: int, seed: int | str) -> Path:
    """The folder of a run with that number of iterations."""
    return folder / f"{METHODS[method]}-{number}-{seed}"


def iterations(timed: Path, minutes: float) -> int:
    """How many iterations of a run take that long, by the later half of a short one."""
    return max(4, round(60 * minutes / fmean(_log(timed)["seconds"][TRIAL // 2 :])))


def _command(task: Task, start: Path, out: Path) -> list[str]:
    """The command of a run, by the name of its folder."""
    name, number, seed = out.name.rsplit("-", 2)
    penalty = ["--kl-weight", "0"] if issubclass(ALGORITHMS[name], RatioOptions) else []
    lengths = ["--iterations", number, "--eval-every", str(-(-int(number) // 4)), "--log-every", "1"]
    places = ["--start", str(start), "--out", str(out), "--seed", "0" if seed == "trial" else seed]
    return ["train", name, *places, *lengths, *task.given(), *task.train.split(), *penalty]


def _train(commands: Mapping[Path, Sequence[str]]) -> None:
    run_in_parallel({out.name: words for out, words in commands.items() if not (out / "model").exists()})


def _log(out: Path) -> dict[str, list[float]]:
    """Games, mean return and seconds of each iteration of a run."""
    log = read_columns(out / "log.csv")
    played = [row for row, number in enumerate(log["games"]) if not math.isnan(number)]  # others are evaluations
    names = {"games": "games", "return": "return", "seconds": "seconds_processor"}
    return {name: [log[column][row] for row in played] for name, column in names.items()}


def _result(out: Path) -> dict[str, Any]:
    log = _log(out)
    minutes = [seconds / 60 for seconds in accumulate(log["seconds"])]
    curve = {"games": list(accumulate(log["games"])), "minutes": minutes, "return": log["return"]}
    return {**json.loads((out / "score.json").read_text()), "curve": curve}


def score(out: Path, path: Path, games: int, seed: int, own: str | None = None) -> dict[str, float]:
    """Mean returns of other games, sampled and greedy, and the share won, sampled; played once and read from a file."""
    if not path.exists():
        finished = load_run(out, own)
        ways = {"sampled": finished.policy(method="sample", seed=seed), "greedy": finished.policy(method="greedy")}
        played = {
            name: finished.task.evaluate(policy, games=games, seed=REPORT + seed)[0] for name, policy in ways.items()
        }
        found = {name: each.mean_return for name, each in played.items()} | {"won": played["sampled"].win_rate}
        print(f"{out.name}: {found}", flush=True)
        write_file(path, json.dumps(found) + "\n")
    return json.loads(path.read_text())


def text(task: str, results: Mapping[str, Any]) -> str:
    """The table of a task."""
    rows = [over_seeds("start, sampled", [results["start"]["sampled"]])]
    for way in ("sampled", "greedy"):
        for method, found in results["methods"].items():
            rows.append(over_seeds(f"{method}, {way}", [each[way] for each in found]))
    won = {method: 100 * fmean(each["won"] for each in found) for method, found in results["methods"].items()}
    last = {method: [each["curve"]["games"][-1] for each in found] for method, found in results["methods"].items()}
    shares = ", ".join(f"{method} {share:.1f}" for method, share in won.items())
    played = ", ".join(f"{method} {fmean(numbers):,.0f}" for method, numbers in last.items())
    return f"{format_seed_table(rows, title=f'{task}: return')}\n\nwon, sampled, %: {shares}\ngames of a run: {played}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online_table", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/online_table"), help="folder of all runs")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="default: all")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="training seeds (default: 5)")
    parser.add_argument("--minutes", type=float, default=4, help="processor time of a run (default: 4)")
    parser.add_argument("--games", type=int, default=1000, help="games that are reported (default: 1000)")
    options = parser.parse_args(arguments)
    for task in options.tasks:
        folder = options.out / f"{task}_{options.minutes:g}"
        sizes: dict[str, Any] = {"minutes": options.minutes, "games": options.games}
        results = run(folder, task, options.methods, options.seeds, **sizes)
        print(f"\n{text(task, results)}", flush=True)
        about = {"machine": machine(), "minutes": options.minutes, "seeds": options.seeds}
        write_file(folder / "results.json", json.dumps({**about, **results}) + "\n")
        curves = {method: [each["curve"] for each in found] for method, found in results["methods"].items()}
        recorded = options.minutes == 4 and options.seeds >= 3
        picture = RESULTS / f"online_table_{task}.png" if recorded else folder / "curves.png"
        draw_learning(picture, f"{task}: return of the games that are learned from", curves)
        if recorded:
            methods = {name: [_returns(each) for each in found] for name, found in results["methods"].items()}
            record = {**about, "start": results["start"], "methods": methods}
            write_file(RESULTS / f"online_table_{task}.json", json.dumps(record, indent=2) + "\n")


def _returns(result: Mapping[str, Any]) -> dict[str, Any]:
    """The returns, the share won and the number of games, without the curve."""
    return {name: result[name] for name in ("sampled", "greedy", "won")} | {"games": result["curve"]["games"][-1]}


if __name__ == "__main__":
    main()
