"""Evaluate trained runs on TextWorld games that nobody has learned from, with random and expert players beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.envs.textworld import ExpertPlayer, RandomAdmissiblePlayer
from torchrl_lang.evaluation import GameRecords, Summary, format_table, write_transcripts
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.recipes.tasks import of_kind
from torchrl_lang.recipes.textworld_task import TextWorldTask
from torchrl_lang.recipes.trained import Trained, load_run
from torchrl_lang.storage import write_file

__all__ = ["TextWorldEvaluate", "main"]

_DRAWS = 5
"""Times that a game is played by who draws words; who does not would play the same again."""


@dataclass(frozen=True)
class TextWorldEvaluate(Options):
    """Play the test games with a trained run, a random player and an expert."""

    run: Path = required("folder of a finished run")
    also: tuple[Path, ...] = option((), "further runs on the same games, such as the one that this one began from")
    games: int | None = option(
        None,
        "number of episodes, the games in turn; none plays each game once, five times where words are drawn",
        at_least=1,
    )
    split: Literal["train", "valid", "test"] = option("test", "which games")
    beta: tuple[float, ...] = option(
        (), "strengths of the values; by default 0, and 1 4 where values were learned", at_least=0
    )
    method: Literal["sample", "greedy", "beam", "best_of"] | None = option(
        None, "how words are chosen; by default both sample and greedy, greedy alone with values"
    )
    seed: int = option(1, "seed of the players", at_least=0)


def main(options: TextWorldEvaluate) -> Path:
    """Evaluate; writes ``evaluation.json``, ``table.txt`` and ``transcripts.txt`` into the run's folder."""
    runs = {folder: load_run(folder) for folder in (options.run, *options.also)}
    task = of_kind(runs[options.run].task, TextWorldTask, options.run)
    for folder, run in runs.items():
        if run.task != task:
            raise ValueError(f"{folder} is about other games than {options.run}: evaluate it by itself.")
    held = getattr(task.sets(), options.split)
    once, often = options.games or len(held), options.games or _DRAWS * len(held)
    told: dict[str, Any] = {"seed": options.seed, "split": options.split}
    chance = RandomAdmissiblePlayer(seed=options.seed)
    played = [
        task.judge(chance, games=often, name="random admissible", offers="admissible", **told),
        task.judge(ExpertPlayer(), games=once, name="expert", offers="expert", **told),
    ]
    mine: list[tuple[Summary, GameRecords]] = []
    for folder, run in runs.items():
        for name, policy in _players(options, folder.name, run):
            games = once if policy.method in ("greedy", "beam") else often
            played.append(task.judge(policy, games=games, name=name, **told))
            mine += played[-1:] if folder == options.run else []
            print(f"played {name}: won {100 * played[-1][0].win_rate:.1f} %", flush=True)
    summaries = [summary for summary, _ in played]
    table = format_table(summaries)
    best, records = max(mine, key=lambda pair: (pair[0].win_rate, pair[0].mean_return))
    tokenizer = runs[options.run].tokenizer
    lost = (~task.won(records)).nonzero().flatten().tolist()[:5]
    write_transcripts(
        options.run / "transcripts.txt", records, tokenizer, games=[*range(min(5, best.games)), *lost], title=best.name
    )
    write_file(options.run / "table.txt", table + "\n")
    figures = {"split": options.split, "games": len(held), "players": [summary.as_dict() for summary in summaries]}
    write_file(options.run / "evaluation.json", json.dumps(figures, indent=2) + "\n")
    print(f"{len(held)} {options.split} games\n{table}")
    print(f"best: {best.name}; the first and the lost games, the table and all figures are in {options.run}")
    return options.run


def _players(options: TextWorldEvaluate, name: str, run: Trained) -> Iterator[tuple[str, Any]]:
    """The ways in which a run plays, by name."""
    betas = options.beta or ((0.0, 1.0, 4.0) if run.has_values else (0.0,))
    for beta in betas if run.has_values else (0.0,):
        usual: tuple[Any, ...] = ("greedy",) if beta else ("sample", "greedy")
        for method in (options.method,) if options.method else usual:
            strength = f" beta {beta:g}" if beta else ""
            yield f"{name}{strength} {method}", run.policy(beta, method=method, seed=options.seed)
