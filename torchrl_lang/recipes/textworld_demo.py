"""The TextWorld demo: games by experts, BC on them, PPO from there, and a table on games with other solutions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.envs.textworld.task import TextWorldData, TextWorldTask
from torchrl_lang.recipes import evaluate
from torchrl_lang.recipes.algorithms import BC, PPO, train
from torchrl_lang.recipes.algorithms.finished import Evaluate
from torchrl_lang.recipes.datasets import generate_once, output_folder
from torchrl_lang.recipes.demo_options import TextWorldDemo

Kind = Literal["coin_collector", "simple"]

# Options of the three stages where they differ from TextWorld's presets.
_DATA: Mapping[str, dict[str, Any]] = {
    "coin_collector": {"games": 320, "valid": 48, "test": 64, "episodes": 1500, "epsilon": (0.0, 0.1, 0.3)},
    "simple": {"games": 400, "episodes": 3000, "foreign": 0.5},
}
_BC: Mapping[str, dict[str, Any]] = {
    "coin_collector": {"steps": 300, "eval_every": 100, "weight_decay": 0.01},
    "simple": {"steps": 1000, "eval_every": 250},
}
_PPO: Mapping[str, dict[str, Any]] = {"coin_collector": {"iterations": 30, "eval_every": 10, "turns": 8}, "simple": {}}
_QUICK: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = (
    {"games": 96, "valid": 16, "test": 32, "episodes": 400},
    {"steps": 100, "eval_every": 50, "eval_games": 32},
    {"iterations": 15, "eval_every": 5, "games": 64, "eval_games": 32, "value_warmup": 4},
)


def main(options: TextWorldDemo) -> Path:
    """Run all stages for each kind, or resume them; returns the folder."""
    with output_folder(options.out):
        for kind in ("coin_collector",) if options.quick else options.kinds:
            began = time.monotonic()
            folder = options.out / (f"{kind}_quick" if options.quick else kind)
            _run(options, kind, folder)
            print(f"{kind}: {(time.monotonic() - began) / 60:.1f} minutes; all results are in {folder}\n", flush=True)
    return options.out


def _run(options: TextWorldDemo, kind: Kind, folder: Path) -> None:
    data_options, bc_options, ppo_options = (
        {**chosen[kind], **(quick if options.quick else {}), "seed": options.seed}
        for chosen, quick in zip((_DATA, _BC, _PPO), _QUICK, strict=True)
    )
    _print_stage(kind, 1, "generate games by experts, some of whom make random moves")
    data = generate_once(TextWorldData(out=folder / "data", kind=kind, **data_options))
    _print_stage(kind, 2, "train a model from scratch on them (bc)")
    train(BC.for_task(TextWorldTask, data=data, out=folder / "bc", **bc_options))
    _print_stage(kind, 3, "continue on its own games with a KL penalty (ppo)")
    train(PPO.for_task(TextWorldTask, start=folder / "bc", out=folder / "ppo", **ppo_options))
    _print_stage(kind, 4, "evaluate on games with other solutions than those of training")
    runs = {"run": folder / "ppo", "also": (folder / "bc",)}
    evaluate.main(Evaluate.for_task(TextWorldTask, **runs, seed=options.seed + 1))


def _print_stage(kind: Kind, number: int, text: str) -> None:
    print(f"\n[{kind} {number}/4] {text}", flush=True)
