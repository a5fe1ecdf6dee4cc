"""Evaluate finished runs beside scripted players: a table with a legend, transcripts, and all figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

from torchrl_lang._files import write_file
from torchrl_lang.evaluation import GameRecords, Summary, format_table
from torchrl_lang.evaluation.plots import plot_guess_histogram
from torchrl_lang.evaluation.tables import format_legend
from torchrl_lang.evaluation.transcripts import write_transcripts
from torchrl_lang.recipes.algorithms.finished import Evaluate
from torchrl_lang.recipes.load_run import FinishedRun, Method, load_run
from torchrl_lang.recipes.options import plain
from torchrl_lang.recipes.tasks.base import Player

_OTHER_GAMES = 1_000_000
"""Distance of the seed of games on which beta is chosen from that of the games that are reported."""

_REPEATS = 5
"""Times that each game of a finite split is played by a random player or sampled policy."""


def main(options: Evaluate) -> Path:
    """Evaluate; writes ``evaluation.json``, ``table.txt`` and ``transcripts.txt`` into the run's folder.

    A second evaluation writes ``evaluation-2.json`` and so on, so that none is lost.
    """
    given = options.given_task()
    device = options.torch_device()
    runs = {folder: load_run(folder, given).to(device) for folder in (options.run, *options.also)}
    task = runs[options.run].task
    for other, run in runs.items():
        if run.task != task:
            raise ValueError(f"{other} is about other games than {options.run}: evaluate it by itself.")
    split = options.split or next(iter(task.splits), None)
    if split not in (task.splits or (None,)):
        raise ValueError(f"split={split!r} is unknown: the task {task.name} has {list(task.splits) or 'no splits'}.")
    number = task.number_of_games(split)
    played: list[tuple[Summary, GameRecords]] = []
    own: list[tuple[Summary, GameRecords]] = []
    for folder, name, player, shows_kl in _players(options, runs):
        often = _REPEATS if player.is_random else 1
        games = options.games or (1000 if number is None else often * number)
        more = dict(player.env_options) | ({} if split is None else {"split": split})
        more |= {} if folder is None else {"device": device}
        summary, records = task.evaluate(player.policy, games=games, seed=options.seed, name=name, **more)
        played.append((summary if shows_kl else replace(summary, kl_per_token=None, kl_per_game=None), records))
        own += played[-1:] if folder == options.run else []
        print(f"played {name}: mean return {played[-1][0].mean_return:.2f}", flush=True)
    summaries = [summary for summary, _ in played]
    legend = format_legend(summaries, turns=task.turns_name, metrics=task.metric_meanings)
    table = f"{format_table(summaries)}\n\n{legend}"
    shown, records = max(own, key=lambda pair: pair[0].mean_return)
    lost = (~task.won(records)).nonzero().flatten().tolist()[:5]
    chosen = sorted({*range(min(5, shown.games)), *lost})
    tokenizer = runs[options.run].tokenizer
    ending = _free_ending(options.run)
    path = options.run / f"transcripts{ending}.txt"
    write_transcripts(path, records, tokenizer, games=chosen, title=shown.name, spelling=task.spelling)
    write_file(options.run / f"table{ending}.txt", table + "\n")
    players = [summary.as_dict() for summary in summaries]
    given_options = plain(options)
    del given_options["run"]  # the folder that they lie in, which may be moved
    figures = {"task": task.name, "split": split, "games": number, "options": given_options, "players": players}
    if options.plots:
        plot_guess_histogram(options.run / f"{task.turns_name}{ending}.png", summaries, turns=task.turns_name)
    write_file(options.run / f"evaluation{ending}.json", json.dumps(figures, indent=2) + "\n")
    print(f"\n{table}\n")
    for folder, run in runs.items():
        if run.values_note:
            print(f"{folder.name}: {run.values_note}")
    print(f"{path}: first and lost games of {shown.name}, whose mean return is this run's highest in the table")
    print(f"{options.run / f'evaluation{ending}.json'}: all figures")
    return options.run


def _free_ending(folder: Path) -> str:
    """Choose the ending of an evaluation's file names: none, or a number from 2 if there is one already."""
    endings = ("" if number == 1 else f"-{number}" for number in count(1))
    return next(ending for ending in endings if not (folder / f"evaluation{ending}.json").exists())


def _players(options: Evaluate, runs: Mapping[Path, FinishedRun]) -> Iterator[tuple[Path | None, str, Player, bool]]:
    """All players of the table: folder of the run, name, player, whether its KL from the model alone is of interest."""
    task = runs[options.run].task
    for name in task.baselines:
        yield None, name, task.player(name, options.seed), False
    for folder, run in runs.items():
        for beta in _betas(options, folder, run):
            for method in _methods(options, run, beta):
                name = f"{folder.name}{f' beta {beta:g}' if beta else ''} {method}"
                policy = run.policy(beta, method=method, seed=options.seed, candidates=options.candidates)
                player = Player(policy, is_random=method in ("sample", "best_of"))
                yield folder, name, player, method == "sample" and beta != 0


def _methods(options: Evaluate, run: FinishedRun, beta: float) -> tuple[Method, ...]:
    """Ways to decode a run with a weight of its values."""
    if options.method is not None:
        return (options.method,)
    if beta:
        return ("greedy",) if run.decoding.include_logits else ("sample", "greedy")
    return run.methods


def _betas(options: Evaluate, folder: Path, run: FinishedRun) -> tuple[float, ...]:
    """The weights of the values to play with; a run without values that is shown beside others has weight 0."""
    if not run.has_values:
        given = tuple(beta for beta in options.beta if beta != "auto")
        return tuple(beta for beta in given if not beta) or (given if given and folder == options.run else (0.0,))
    if not run.decoding.include_logits:
        return run.betas
    betas: list[float] = [beta for beta in options.beta if beta != "auto"]
    if "auto" in options.beta:
        found = run.choose_beta(seed=options.seed + _OTHER_GAMES)
        returns = ", ".join(f"{beta:g}: {value:.2f}" for beta, value in found.items())
        print(f"{folder.name}: mean return by beta on other games: {returns}", flush=True)
        betas.append(next(iter(found)))
    return tuple(dict.fromkeys(betas))
