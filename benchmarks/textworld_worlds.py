"""Worlds of TextWorld (arXiv 2510.01132), on games never seen: ``python -m benchmarks.textworld_worlds``.

Demonstrations are of training games alone, by an expert with some random commands, who first looks at what it carries.
A name, such as "desk", means no more than what the game writes of it, so each training episode exchanges the names at
random, and a small model learns to copy them from the text, by imitation and then by PPO. A call makes, trains and
plays what is missing in its folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import RESULTS, machine
from torchrl_lang._files import write_file
from torchrl_lang.recipes.compare import run_in_parallel
from torchrl_lang.recipes.load_run import load_run


class World(NamedTuple):
    """Limits of a world's games."""

    turns: int
    row_length: int


GAMES = "--kind custom --template lower --exchange --games 640 --valid 40 --test 100 --action-length 24"
EXPERT = "--first-command inventory --episodes 8000"
FEW = "--first-command inventory --episodes 100 --batch 100 --copies 80"
"""100 demonstrations, each written 80 times with other names."""
BC = "--layers 3 --width 128 --steps 4500 --batch-size 16 --lr 3e-3 --eval-every 900 --eval-games 100"
PPO = "--iterations 30 --games 128 --eval-every 10 --eval-games 80"
WORLDS = {"w2-o3-q4": World(12, 768), "w4-o6-q8": World(24, 2048)}
REPORT = 2_000_000


def run(home: Path, world: str, expert: str, seed: int) -> dict[str, dict[str, float]]:
    """Make, train and play what is missing of a world; the share of test games won, by method and decoding."""
    limits = WORLDS[world]
    data, bc, ppo = (home / name for name in ("data", "bc", "ppo"))
    games = f"{GAMES} --world {world} --max-turns {limits.turns} --row-length {limits.row_length}"
    commands = {
        data: ["generate", "textworld", *games.split(), *expert.split()],
        bc: ["train", "bc", "--data", str(data), *BC.split()],
        ppo: ["train", "ppo", "--start", str(bc), "--turns", str(limits.turns), *PPO.split()],
    }
    for out, command in commands.items():
        if not (out / "tokenizer.json").exists() and not (out / "model").exists():
            run_in_parallel({out.name: [*command, "--out", str(out), "--seed", str(seed)]})
    return {"BC": won(bc, seed), "PPO": won(ppo, seed)}


def won(out: Path, seed: int) -> dict[str, float]:
    """Shares of test games won, each played five times sampled and once greedily; kept in a file."""
    path = out / "score.json"
    if not path.exists():
        finished = load_run(out)
        number = finished.task.number_of_games("test")
        ways = {
            "sampled": (finished.policy(method="sample", seed=seed), 5),
            "greedy": (finished.policy(method="greedy"), 1),
        }
        found = {
            name: finished.task.evaluate(policy, games=times * number, split="test", seed=REPORT + seed)[0].win_rate
            for name, (policy, times) in ways.items()
        }
        write_file(path, json.dumps(found) + "\n")
    return json.loads(path.read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.textworld_worlds", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/textworld_worlds"), help="folder of all runs")
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=list(WORLDS), help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds (default: 1)")
    parser.add_argument("--few", action="store_true", help="100 demonstrations in place of 8,000")
    options = parser.parse_args(arguments)
    expert, ending = (FEW, "-few") if options.few else (EXPERT, "")
    for world in options.worlds:
        name = world + ending
        found = [run(options.out / f"{name}-{seed}", world, expert, seed) for seed in range(options.seeds)]
        record = {"machine": machine(), "games": GAMES, "expert": expert, "bc": BC, "ppo": PPO}
        write_file(RESULTS / f"textworld_{name}.json", json.dumps({**record, "won": found}, indent=2) + "\n")
        print(f"{name}, test games won: {found}", flush=True)


if __name__ == "__main__":
    main()
