"""Evaluate a trained run: a table of players, transcripts, a picture, figures as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.evaluation import TILES, format_table, plot_guess_histogram, write_transcripts
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.recipes.tasks import of_kind
from torchrl_lang.recipes.trained import load_run
from torchrl_lang.recipes.wordle_task import WordleTask
from torchrl_lang.storage import write_file

__all__ = ["WordleEvaluate", "main"]


@dataclass(frozen=True)
class WordleEvaluate(Options):
    """Play a fixed set of games with a trained run."""

    run: Path = required("folder of a finished run")
    games: int = option(1000, "number of games", at_least=1)
    beta: tuple[float, ...] = option(
        (), "strengths of the values; by default 0, and 2 4 8 where values were learned", at_least=0
    )
    method: Literal["sample", "greedy", "beam", "best_of"] | None = option(
        None, "how words are chosen; by default greedy with values and sample without"
    )
    seed: int = option(1, "seed of the games", at_least=0)
    plots: bool = option(True, "draw the histogram (needs matplotlib)")


def main(options: WordleEvaluate) -> Path:
    """Evaluate; writes ``evaluation.json``, ``transcripts.txt`` and ``guesses.png`` into the run's folder."""
    run = load_run(options.run)
    task = of_kind(run.task, WordleTask, options.run)
    betas = options.beta or ((0.0, 2.0, 4.0, 8.0) if run.has_values else (0.0,))
    played = []
    for beta in betas:
        name = f"{options.run.name} beta {beta:g}" if beta else options.run.name
        policy = run.policy(beta, method=options.method or ("greedy" if beta else "sample"), seed=options.seed)
        played.append(task.judge(policy, games=options.games, seed=options.seed, name=name))
        print(f"played {name}: mean return {played[-1][0].mean_return:.2f}", flush=True)
    summaries = [summary for summary, _ in played]
    best, records = max(played, key=lambda pair: pair[0].mean_return)
    path = options.run / "transcripts.txt"
    write_transcripts(path, records, run.tokenizer, games=10, title=best.name, spelling=TILES)
    write_file(options.run / "evaluation.json", json.dumps([s.as_dict() for s in summaries], indent=2) + "\n")
    if options.plots:
        plot_guess_histogram(options.run / "guesses.png", summaries)
    print(format_table(summaries))
    print(f"best: {best.name}; its transcripts, all figures and a picture are in {options.run}")
    return options.run
