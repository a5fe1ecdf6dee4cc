"""Every offline method on several Wordle datasets, with training seeds: ``python -m benchmarks.wordle_table``.

Each method decodes in the way that played best on other games. A call trains what is missing in its folder and
continues what was interrupted; the table shows what has not been run as a gap.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensordict.nn import TensorDictModuleBase

from benchmarks.common import RESULTS, machine
from benchmarks.seed_figure import draw_intervals
from torchrl_lang._files import write_file
from torchrl_lang.envs.wordle.human import example_tweets
from torchrl_lang.envs.wordle.task import WordleData
from torchrl_lang.evaluation import SeedSummary, format_seed_table, over_seeds
from torchrl_lang.evaluation.metrics import lmrl_gym_score
from torchrl_lang.recipes.compare import PlannedRun, decodings, planned_runs, train_missing
from torchrl_lang.recipes.datasets import generate_once, open_dataset
from torchrl_lang.recipes.demo_options import METHODS
from torchrl_lang.recipes.load_run import load_run

NAMES: dict[str, str] = {method.title: name for name, method in METHODS.items()}
"""Titles of the methods in the table, and their names."""

DATA: dict[str, dict[str, Any]] = {
    "mediocre": {"player": "mediocre"},
    "habit": {"player": "habit"},
    "human": {"make": "human", "tweets": example_tweets()},
}
"""Names of the datasets, and options of ``generate wordle``."""

CHOICE, REPORT = 1_000_000, 2_000_000
"""Seeds of the games on which the decoding is chosen, and of those that are reported; the training's seed is added."""

WORST = -6.0
WEIGHT_CLIP = 20


class Setting(NamedTuple):
    """What all runs of a table share."""

    words: int
    games: int
    steps: int
    choice_games: int
    report_games: int
    layers: int
    width: int
    batch_size: int = 32
    ema_decay: float = 0.0
    advantage_temperature: float = 0.0
    """Of ILQL alone."""


FULL = Setting(words=50, games=40_000, steps=6000, choice_games=250, report_games=1000, layers=2, width=64)
LARGE = Setting(
    words=430,
    games=1_500_000,
    steps=40_000,
    choice_games=1000,
    report_games=4000,
    layers=6,
    width=192,
    batch_size=256,
    ema_decay=0.998,
    advantage_temperature=4.0,
)
"""For a data-centre GPU."""
QUICK = Setting(words=20, games=4000, steps=200, choice_games=50, report_games=200, layers=2, width=32)


def run(setting: Setting, folder: Path, data: Sequence[str], methods: Sequence[str], seeds: int) -> dict[str, Any]:
    """Train and play what is missing; the table of the whole folder as data for JSON."""
    for seed in range(seeds):
        for name in data:
            train(setting, folder / f"{name}-{seed}", name, methods, seed)
            for method in methods:
                score(setting, folder / f"{name}-{seed}", method, seed)
            score_scripted(setting, folder / f"{name}-{seed}", seed)
    return {"machine": machine(), "setting": setting._asdict(), "returns": dict(collect(folder))}


def train(setting: Setting, folder: Path, data: str, methods: Sequence[str], seed: int) -> None:
    """Make a dataset and train on it, as many runs at a time as there are cores."""
    chosen = {"words": str(setting.words), "games": setting.games, "seed": seed, **DATA[data]}
    options = WordleData(out=folder / "data", **chosen)
    shared: dict[str, Any] = {
        "data": generate_once(options),
        "steps": setting.steps,
        "seed": seed,
        "eval-every": -(-setting.steps // 8),
        "layers": setting.layers,
        "width": setting.width,
        "batch-size": setting.batch_size,
        "ema-decay": setting.ema_decay,
    }
    places = {name: folder / place(method.title) for name, method in METHODS.items()}
    runs = planned_runs([NAMES[method] for method in methods], places, shared)
    train_missing([_weighted(run, setting) if run.method == "ilql" else run for run in runs])


def _weighted(run: PlannedRun, setting: Setting) -> PlannedRun:
    """The run of ILQL, whose policy learns with the weights of its values if the setting has some."""
    if not setting.advantage_temperature:
        return run
    weights = {"advantage-temperature": setting.advantage_temperature, "weight-clip": WEIGHT_CLIP}
    return run._replace(options={**run.options, **weights})


def place(method: str) -> str:
    """The name of a method's folder."""
    return method.lower().replace(" %", "").replace(",", "").replace(" ", "_")


def score(setting: Setting, folder: Path, method: str, seed: int) -> None:
    """Choose the decoding on some games and play others with it."""
    path = folder / place(method) / "score.json"
    if path.exists():
        return
    finished = load_run(folder / place(method))

    def mean_return(policy: TensorDictModuleBase, games: int, first: int) -> float:
        return finished.task.evaluate(policy, games=games, seed=first + seed)[0].mean_return

    policies = dict(decodings(finished, by_values=METHODS[NAMES[method]].by_values))
    chosen = max(policies, key=lambda name: mean_return(policies[name], setting.choice_games, CHOICE))
    found = {"decoding": chosen, "return": mean_return(policies[chosen], setting.report_games, REPORT)}
    print(f"{folder.name}, {method}: {found['return']:.2f} ({chosen})", flush=True)
    write_file(path, json.dumps(found) + "\n")


def score_scripted(setting: Setting, folder: Path, seed: int) -> None:
    """The data's mean return, and that of the myopic-optimal player on the reported games."""
    path = folder / "scripted.json"
    if path.exists():
        return
    dataset, task = open_dataset(folder / "data")
    player = task.player("optimal", seed)
    best, _ = task.evaluate(player.policy, games=setting.report_games, seed=REPORT + seed)
    found = {"data": dataset.manifest["mean_return"], "optimal (myopic)": best.mean_return}
    write_file(path, json.dumps(found) + "\n")


def collect(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each dataset each player's returns by seed, and each method's decodings; None where a run is missing."""
    found = sorted(folder.glob("*-[0-9]*"))
    for data in dict.fromkeys(part.name.rpartition("-")[0] for part in found):
        parts = [part for part in found if part.name.rpartition("-")[0] == data]
        scripted = [_read(part / "scripted.json") for part in parts]
        players: dict[str, Any] = {"data": [one and one["data"] for one in scripted]}
        for method in NAMES:
            scores = [_read(part / place(method) / "score.json") for part in parts]
            players[method] = [one and one["return"] for one in scores]
            players[f"{method}: decoding"] = [one and one["decoding"] for one in scores]
        players["optimal (myopic)"] = [one and one["optimal (myopic)"] for one in scripted]
        yield data, players


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def summaries(players: Mapping[str, Sequence[Any]], *, normalised: bool = False) -> list[SeedSummary]:
    """A summary for each player with results; normalised to 0 for -6, 50 for the data, 100 for the optimal player."""
    found = []
    for name, values in (_normalised(players) if normalised else _returns(players)).items():
        kept = [value for value in values if value is not None]
        if kept:
            found.append(over_seeds(name, kept))
    return found


def _returns(players: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[float | None]]:
    return {name: values for name, values in players.items() if not name.endswith(": decoding")}


def _normalised(players: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[float | None]]:
    """None where the return is missing, or that of the data or of the optimal player."""
    limits = list(zip(players["data"], players["optimal (myopic)"], strict=True))
    return {
        name: [
            None if None in (value, data, best) else lmrl_gym_score(value, worst=WORST, data=data, best=best)
            for value, (data, best) in zip(values, limits, strict=True)
        ]
        for name, values in _returns(players).items()
    }


def text(results: Mapping[str, Any]) -> str:
    """The tables, one for each dataset."""
    parts = []
    for data, players in results["returns"].items():
        table = format_seed_table(summaries(players), title=data)
        scaled = format_seed_table(summaries(players, normalised=True), title=f"{data}, normalised", digits=1)
        parts += [table, scaled]
        gaps = [name for name, values in _returns(players).items() if None in values]
        parts += [f"not run with every seed: {', '.join(gaps)}"] if gaps else []
        others = [name for name, values in _normalised(players).items() if None in values and name not in gaps]
        parts += [f"not normalised with every seed: {', '.join(others)}"] if others else []
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wordle_table", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/wordle_table"), help="folder of all runs")
    parser.add_argument("--data", nargs="*", choices=DATA, default=list(DATA), help="datasets to run (default: all)")
    parser.add_argument("--methods", nargs="*", choices=NAMES, default=list(NAMES), help="methods (default: all)")
    parser.add_argument("--seeds", type=int, help="training seeds, each with its own dataset (default: 3; large: 5)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="20 words and short runs, a few minutes; not recorded")
    size.add_argument("--large", action="store_true", help="430 words and long runs, for a data-centre GPU")
    for name, default in FULL._asdict().items():
        about = f"default {default}; large {getattr(LARGE, name)}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=about)
    options = parser.parse_args(arguments)
    given = {name: value for name in Setting._fields if (value := getattr(options, name)) is not None}
    setting = (QUICK if options.quick else LARGE if options.large else FULL)._replace(**given)
    seeds = options.seeds or (5 if options.large else 3)
    folder = options.out / "_".join(map(str, setting))
    results = run(setting, folder, options.data, options.methods, seeds)
    print(f"\n{text(results)}")
    if options.quick:
        return
    name = f"wordle_table_{setting.words}_{setting.steps}"
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    panels = {data: summaries(players) for data, players in results["returns"].items()}
    draw_intervals(RESULTS / f"{name}.png", f"Wordle with {setting.words} words: mean return, 95 % intervals", panels)


if __name__ == "__main__":
    main()
