"""Make a data set of Wordle games: scripted players in a TorchRL collector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.data import generate_dataset
from torchrl_lang.envs.wordle import OptimalPlayer, RandomWordPlayer, RepeatPlayer, WrongPlayer
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.recipes.tasks import check_place
from torchrl_lang.recipes.wordle_task import MEDIOCRE, WordleTask, mediocre_player

__all__ = ["WordleData", "main", "notes"]


@dataclass(frozen=True)
class WordleData(Options):
    """A data set of Wordle games, played by scripted players."""

    out: Path = required("folder of the data set")
    games: int = option(60_000, "number of games", at_least=1)
    words: str = option("100", "how many of the shipped words, `all` of them, or a file with one word a line")
    rules: Literal["official", "ilql"] = option("official", "`ilql` does not count repeated letters")
    player: Literal["mediocre", "careful", "careless", "random", "wrong", "repeat", "optimal"] = option(
        "mediocre", "who plays: a mixture of players, or one of them"
    )
    batch: int = option(2048, "games played side by side", at_least=1)
    seed: int = option(0, "seed of words and players", at_least=0)
    overwrite: bool = option(False, "replace a data set that is there")


def notes(options: WordleData) -> dict[str, Any]:
    """What the manifest keeps: the task, and all that the games depend on."""
    task = WordleTask.of(options.words, options.rules)
    mixture = list(MEDIOCRE) if options.player == "mediocre" else None
    return {**task.notes(), "player": options.player, "mixture": mixture, "batch": options.batch, "seed": options.seed}


def main(options: WordleData) -> Path:
    """Play and write; returns the folder."""
    check_place(options.out, new=True)
    task = WordleTask.of(options.words, options.rules)
    words = list(task.words)
    rules, seed = options.rules, options.seed
    players = {
        "mediocre": lambda: mediocre_player(task, seed=options.seed),
        "careful": lambda: RandomWordPlayer(words, prob_smart=1.0, rules=rules, seed=seed),
        "careless": lambda: RandomWordPlayer(words, prob_smart=0.5, rules=rules, seed=seed),
        "random": lambda: RandomWordPlayer(words, rules=rules, seed=seed),
        "wrong": lambda: WrongPlayer(words, rules=rules, seed=seed),
        "repeat": lambda: RepeatPlayer(words, rules=rules, seed=seed),
        "optimal": lambda: OptimalPlayer(words, rules=rules, seed=seed),
    }
    dataset = generate_dataset(
        task.env(min(options.batch, options.games)),
        players[options.player](),
        options.out,
        episodes=options.games,
        seed=options.seed,
        source=f"{options.player} player on {len(words)} words, {options.rules} rules",
        notes=notes(options),
        overwrite=options.overwrite,
    )
    figures = dataset.manifest
    print(f"{len(dataset)} games, mean return {figures['mean_return']:.2f}, {figures['tokens']} tokens: {options.out}")
    return options.out
