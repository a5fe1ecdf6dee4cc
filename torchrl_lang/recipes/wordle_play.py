"""Play Wordle in the terminal, or watch a trained run play."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.envs.wordle import OptimalPlayer, play_human, watch
from torchrl_lang.recipes.options import Options, option
from torchrl_lang.recipes.tasks import of_kind
from torchrl_lang.recipes.trained import load_run
from torchrl_lang.recipes.wordle_task import WordleTask

__all__ = ["WordlePlay", "main"]


@dataclass(frozen=True)
class WordlePlay(Options):
    """Play Wordle in the terminal, with coloured tiles; or watch."""

    watch: str | None = option(None, "watch instead of playing: the folder of a finished run, or `optimal`")
    beta: float = option(4.0, "strength of the learned values of the run that is watched", at_least=0)
    games: int = option(3, "games to watch", at_least=1)
    words: str = option("all", "how many of the shipped words, `all` of them, or a file; a run brings its own")
    rules: Literal["official", "ilql"] = option("official", "`ilql` does not count repeated letters")
    seed: int | None = option(None, "seed of the hidden words; default: a new one each time", at_least=0)


def main(options: WordlePlay) -> None:
    """Play or watch until the games are over."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    if options.watch is None:
        if sys.stdin is None:
            raise ValueError("Standard input is closed, so nobody can guess: open it, or give --watch.")
        play_human(WordleTask.of(options.words, options.rules).env(1, seed=seed))
        return
    if options.watch == "optimal":
        task = WordleTask.of(options.words, options.rules)
        policy = OptimalPlayer(list(task.words), rules=task.rules, seed=seed)
    else:
        run = load_run(Path(options.watch))
        task = of_kind(run.task, WordleTask, Path(options.watch))
        policy = run.policy(options.beta if run.has_values else 0.0, method="greedy")
    watch(task.env(1, seed=seed), policy, games=options.games)
