"""The Wordle demo: games by scripted players, BC and ILQL on them, and one table of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from torchrl_lang.data import RowDataset
from torchrl_lang.evaluation import (
    TILES,
    GameRecords,
    Summary,
    format_table,
    plot_guess_histogram,
    plot_learning_curves,
    write_transcripts,
)
from torchrl_lang.recipes.datasets import check_place, generate_once, open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.options import Options, option
from torchrl_lang.recipes.run_common import print_stage
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.recipes.tasks.wordle import WordleData
from torchrl_lang.storage import folder_lock, write_file

__all__ = ["Demo", "main"]


@dataclass(frozen=True, kw_only=True)
class Demo(Options):
    """Wordle: scripted games, BC and ILQL from scratch on them, and a table, in ten minutes on two cores."""

    out: Path = option(Path("runs/demo"), "folder of all results")
    words: int = option(100, "how many of the shipped words", at_least=1, at_most=2250)
    games: int = option(60_000, "games in the dataset", at_least=1)
    steps: int = option(5000, "training steps of BC and of ILQL", at_least=1)
    eval_games: int = option(1000, "games for each row of the table", at_least=1)
    betas: tuple[float, ...] = option((2.0, 4.0, 8.0, 16.0), "weights of ILQL's values in the table", at_least=0)
    seed: int = option(0, "seed of everything", at_least=0)


def main(options: Demo) -> Path:
    """Run the demo; returns the folder with table, plots, transcripts and ``results.json``."""
    check_place(options.out)
    with folder_lock(options.out, "runs this demo"):
        began = time.monotonic()
        print_stage("", 1, f"generate {options.games} games by scripted players of mixed skill, {options.words} words")
        chosen: dict[str, Any] = {"games": options.games, "words": str(options.words), "seed": options.seed}
        data = generate_once(WordleData(out=options.out / "data", **chosen))
        print_stage("", 2, "train behaviour cloning (bc) and ILQL (ilql) from scratch, in parallel")
        _train(options, data)
        print_stage("", 3, f"play {options.eval_games} games with each")
        summaries = _play(options, *open_dataset(data))
        print_stage("", 4, "results")
        _write(options, summaries, (time.monotonic() - began) / 60)
    return options.out


def _train(options: Demo, data: Path) -> None:
    """Run both trainings in parallel, each with half of the cores: small models gain little from a second one."""
    shared = ["--data", data, "--steps", options.steps, "--seed", options.seed]
    shared += ["--eval-every", -(-options.steps // 9)]
    commands = {name: ["train", name, "--out", options.out / name, *shared] for name in ("bc", "ilql")}
    threads = min(max((os.cpu_count() or 2) // 2, 1), 2)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    _run_in_parallel({name: list(map(str, words)) for name, words in commands.items()}, environment)


def _run_in_parallel(commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
    """Run commands of this package in parallel and print their output; when one fails, stop all.

    Raises:
        ValueError: a command failed; its message has been printed.
    """
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "torchrl_lang", *words],
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, words in commands.items()
    }
    stopped = Event()
    readers = [Thread(target=_relay, args=(process.stdout, stopped), daemon=True) for process in running.values()]
    for reader in readers:
        reader.start()
    try:
        while any(process.poll() is None for process in running.values()) and not _failed(running):
            time.sleep(0.2)
    except KeyboardInterrupt:
        stopped.set()  # the demo prints one message for all
        raise
    finally:
        failed = _failed(running)
        for process in running.values():
            process.terminate()
            process.wait()
        for reader in readers:
            reader.join()
    if failed:
        raise ValueError(f"training {' and '.join(failed)} failed; its message is above.")


def _failed(running: Mapping[str, subprocess.Popen[str]]) -> list[str]:
    return [name for name, process in running.items() if process.poll() not in (None, 0)]


def _relay(stream: IO[str], stopped: Event) -> None:
    """Print the lines of a stream until its end; none after the commands were stopped."""
    for line in stream:
        if not stopped.is_set():
            print(line, end="", flush=True)


def _play(options: Demo, dataset: RowDataset, task: Task) -> dict[str, Summary]:
    """The summary of each player; all play the same hidden words."""
    control = dataset.tokenizer.control
    seed = options.seed + 1000
    summaries = {"data": task.summary(GameRecords.from_rows(dataset[:], control), "data")}
    bc, ilql = load_run(options.out / "bc"), load_run(options.out / "ilql")
    players: dict[str, Any] = {"BC": bc.policy(seed=seed), "BC greedy": bc.policy(method="greedy")}
    players |= {f"ILQL beta {beta:g}": ilql.policy(beta, method="greedy") for beta in options.betas}
    players["optimal (myopic)"] = task.player("optimal", seed).policy
    for name, policy in players.items():
        summaries[name], records = task.evaluate(policy, games=options.eval_games, seed=seed, name=name)
        print(f"{name}: mean return {summaries[name].mean_return:.2f}", flush=True)
        path = options.out / "transcripts" / f"{name.replace(' ', '_')}.txt"
        write_transcripts(path, records, dataset.tokenizer, games=10, title=name, spelling=TILES)
    return summaries


def _write(options: Demo, summaries: Mapping[str, Summary], minutes: float) -> None:
    """Write the files, then print the table, so that a closed output loses nothing."""
    out, table = options.out, format_table(list(summaries.values()))
    write_file(out / "table.txt", table + "\n")
    results = {
        "options": {name: getattr(options, name) for name in ("words", "games", "steps", "eval_games", "seed")},
        "minutes_of_this_call": round(minutes, 2),
        "players": {name: summary.as_dict() for name, summary in summaries.items()},
    }
    write_file(out / "results.json", json.dumps(results, indent=2) + "\n")
    levels = {name: summaries[name].mean_return for name in ("data", "optimal (myopic)")}
    runs = {name: out / name / "log.csv" for name in ("bc", "ilql")}
    curves = plot_learning_curves(
        out / "learning_curves.png",
        runs,
        panels=("return", "win_rate", "loss"),
        references=levels,
        title="Wordle, offline",
    )
    best = max((name for name in summaries if name.startswith("ILQL")), key=lambda name: summaries[name].mean_return)
    shown = [summaries[name] for name in ("data", "BC", "BC greedy", best, "optimal (myopic)")]
    histogram = plot_guess_histogram(out / "guesses.png", shown, title="Guesses needed")
    print(f"{table}\n\nlearning curves  {curves}\nguesses needed   {histogram}\ntranscripts      {out / 'transcripts'}")
    print(f"figures          {out / 'results.json'}\n{minutes:.1f} minutes")
