"""Imitation in worlds of TextWorld (arXiv 2510.01132), on games never seen: ``python -m benchmarks.textworld_worlds``.

Demonstrations are of training games alone, by an expert with some random commands. A name, such as "desk", means no
more than what the game writes of it, so copies of the demonstrations exchange the names at random, and a small model
learns to copy them from the text. A call makes, trains and plays what is missing in its folder.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.common import RESULTS, machine
from torchrl_lang._files import write_file
from torchrl_lang.data import RowDataset, write_dataset
from torchrl_lang.envs.textworld.games import theme_words
from torchrl_lang.recipes.compare import run_in_parallel
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.schema import TOKENS


class World(NamedTuple):
    """Limits of a world's games."""

    turns: int
    row_length: int


GAMES = "--kind custom --template lower --games 640 --valid 40 --test 100 --action-length 24 --episodes 3000"
TRAIN = "--layers 3 --width 128 --steps 1500 --batch-size 16 --lr 3e-3 --eval-every 500 --eval-games 100"
WORLDS = {"w2-o3-q4": World(12, 768), "w4-o6-q8": World(24, 2048)}
COPIES = 4
OFTEN = 0.12
"""Words of names that a greater share of the rows have are words of the engine's sentences, too."""
REPORT = 2_000_000


def run(folder: Path, world: str, seed: int) -> dict[str, float]:
    """Make, train and play what is missing of a world; the share of test games won, by decoding."""
    limits, home = WORLDS[world], folder / f"{world}-{seed}"
    data, renamed, bc = (home / name for name in ("data", "renamed", "bc"))
    if not data.exists():
        games = f"{GAMES} --world {world} --max-turns {limits.turns} --row-length {limits.row_length}"
        run_in_parallel({"data": ["generate", "textworld", *games.split(), "--out", str(data), "--seed", str(seed)]})
    if not renamed.exists():
        with_other_names(open_dataset(data)[0], renamed, seed)
    if not (bc / "model").exists():
        places = ["--data", str(renamed), "--out", str(bc), "--seed", str(seed)]
        run_in_parallel({"bc": ["train", "bc", *TRAIN.split(), *places]})
    return won(bc, seed)


def with_other_names(dataset: RowDataset, out: Path, seed: int) -> None:
    """Write a dataset and copies of it, in each row of which the words of names are exchanged for each other."""
    rows = dataset[:]
    names = words_of_names(rows[TOKENS], dataset.tokenizer.symbols)
    random = torch.Generator().manual_seed(seed)
    copies = [exchanged(rows, names, dataset.tokenizer.vocab_size, random) for _ in range(COPIES - 1)]
    about: dict[str, Any] = {name: dataset.manifest[name] for name in ("source", "notes", "seed")}
    write_dataset(out, torch.cat([rows, *copies]), dataset.tokenizer, **about)


def words_of_names(tokens: Tensor, symbols: Sequence[str]) -> Tensor:
    """The ids of words of the engine's names, with the space before them, that are rare in the rows otherwise."""
    words = {" " + word for word in re.findall("[a-z]+", theme_words().lower())}
    ids = torch.tensor([number for number, symbol in enumerate(symbols) if symbol in words])
    shares = torch.stack([(tokens == number).any(-1).float().mean() for number in ids])
    return ids[shares < OFTEN]


def exchanged(rows: TensorDict, names: Tensor, vocabulary: int, random: torch.Generator) -> TensorDict:
    """The rows with the names of each one permuted."""
    tokens = rows[TOKENS].clone()
    for row in tokens:
        other = torch.arange(vocabulary)
        other[names] = names[torch.randperm(len(names), generator=random)]
        row.copy_(other[row.long()])
    return rows.clone(recurse=False).set(TOKENS, tokens)


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
    options = parser.parse_args(arguments)
    for world in options.worlds:
        found = [run(options.out, world, seed) for seed in range(options.seeds)]
        record = {"machine": machine(), "train": TRAIN, "copies": COPIES, "won": found}
        write_file(RESULTS / f"textworld_{world}.json", json.dumps(record, indent=2) + "\n")
        print(f"{world}, BC, test games won: {found}", flush=True)


if __name__ == "__main__":
    main()
