"""Play a task in the terminal, or watch a policy."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks.base import Player, PlayOptions


def main(options: PlayOptions) -> None:
    """Play a game, or watch some."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    if options.watch is None:
        if sys.stdin is None:
            raise ValueError("Standard input is closed: open it to play, or give --watch.")
        options.task().play(seed)
    elif Path(options.watch).is_dir():
        run = load_run(Path(options.watch), type(options.task()))
        player = Player(run.policy(options.beta if run.has_values else 0.0, method="greedy"))
        run.task.watch(player, games=options.games, seed=seed)
    else:
        task = options.task()
        task.watch(task.player(options.watch, seed), games=options.games, seed=seed)
