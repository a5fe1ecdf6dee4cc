"""TextWorld from end to end: experts play, a small model imitates them, goes on by itself, and is judged elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes import bc, ppo, textworld_data, textworld_evaluate
from torchrl_lang.recipes.options import Options, option
from torchrl_lang.recipes.tasks import check_place
from torchrl_lang.storage import Fields, folder_lock

__all__ = ["TextWorldDemo", "main"]

Kind = Literal["coin_collector", "simple"]

# What differs between the kinds: a corridor is learned from few games, an order of many words from more.
_DATA: Mapping[str, dict[str, Any]] = {
    "coin_collector": {"games": 320, "valid": 48, "test": 64, "episodes": 1500, "epsilon": (0.0, 0.1, 0.3)},
    "simple": {"games": 400, "episodes": 3000, "foreign": 0.5},
}
_BC: Mapping[str, dict[str, Any]] = {
    "coin_collector": {"steps": 300, "eval_every": 100, "weight_decay": 0.01},
    "simple": {"steps": 1000, "eval_every": 250},
}
_PPO: Mapping[str, dict[str, Any]] = {
    "coin_collector": {"iterations": 30, "eval_every": 10, "turns": 8},
    "simple": {},
}
_QUICK: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = (
    {"games": 96, "valid": 16, "test": 32, "episodes": 400},
    {"steps": 100, "eval_every": 50, "eval_games": 32},
    {"iterations": 15, "eval_every": 5, "games": 64, "eval_games": 32, "value_warmup": 4},
)


@dataclass(frozen=True)
class TextWorldDemo(Options):
    """TextWorld from end to end: experts' games, imitation, PPO, and a table on games that nobody learned from."""

    out: Path = option(Path("runs/textworld"), "folder of everything that is written")
    kinds: tuple[Kind, ...] = option(("coin_collector", "simple"), "which of the engine's kinds of game")
    quick: bool = option(False, "five minutes: the coin collector alone, with fewer games and steps")
    seed: int = option(0, "seed of weights, games and words", at_least=0)


def main(options: TextWorldDemo) -> Path:
    """Run all stages of each kind; what is there from an earlier call is used again. Returns the folder."""
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        _all_kinds(options)
    return options.out


def _all_kinds(options: TextWorldDemo) -> None:
    for kind in ("coin_collector",) if options.quick else options.kinds:
        began = time.monotonic()
        folder = options.out / (f"{kind}_quick" if options.quick else kind)
        _stages(options, kind, folder)
        print(f"{kind}: {(time.monotonic() - began) / 60:.1f} minutes; everything is in {folder}\n", flush=True)


def _stages(options: TextWorldDemo, kind: Kind, folder: Path) -> None:
    data, imitation, practice = (
        {**chosen[kind], **(quick if options.quick else {})}
        for chosen, quick in zip((_DATA, _BC, _PPO), _QUICK, strict=True)
    )
    _say(kind, 1, "experts play, some of whom err")
    wanted = textworld_data.TextWorldData(out=folder / "data", kind=kind, seed=options.seed, **data)
    if (folder / "data" / "manifest.json").exists():
        _check(folder, wanted)
    else:
        textworld_data.main(wanted)
    _say(kind, 2, "a model from scratch imitates them (bc)")
    bc.main(bc.TextWorldBC(data=folder / "data", out=folder / "bc", seed=options.seed, **imitation))
    _say(kind, 3, "it plays and learns from its own games, near to where it was (ppo)")
    ppo.main(ppo.TextWorldPPO(start=folder / "bc", out=folder / "ppo", seed=options.seed, **practice))
    _say(kind, 4, "all play games with other solutions than those that were learned from")
    judged = textworld_evaluate.TextWorldEvaluate(run=folder / "ppo", also=(folder / "bc",), seed=options.seed + 1)
    textworld_evaluate.main(judged)


def _check(folder: Path, wanted: textworld_data.TextWorldData) -> None:
    path = folder / "data" / "manifest.json"
    notes = Fields.read(path, remedy=f"delete {folder / 'data'}, it is then made again").object("notes").content
    played = {"epsilon": wanted.epsilon, "foreign": wanted.foreign, "seed_of_play": wanted.seed}
    expected = json.loads(json.dumps(textworld_data.task_of(wanted).notes() | played))
    if any(notes.get(key) != value for key, value in expected.items()):
        raise ValueError(f"{folder / 'data'} holds games of other options: delete {folder} or give another --out.")
    print(f"using the data set that is there: {folder / 'data'}")


def _say(kind: str, number: int, text: str) -> None:
    print(f"\n[{kind} {number}/4] {text}", flush=True)
