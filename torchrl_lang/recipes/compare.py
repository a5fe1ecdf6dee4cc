"""Comparisons: train offline methods on the same data, choose their decodings on other games, and play."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any, NamedTuple

from tensordict.nn import TensorDictModuleBase

from torchrl_lang._files import Record, write_file, write_json
from torchrl_lang.evaluation import SeedSummary, Summary, format_seed_table, format_table, over_seeds
from torchrl_lang.modules import ReturnEmbedding
from torchrl_lang.recipes.algorithms.finished import BETAS
from torchrl_lang.recipes.demo_options import METHODS
from torchrl_lang.recipes.load_run import FinishedRun, load_run
from torchrl_lang.recipes.options import plain


def run_in_parallel(commands: Mapping[str, Sequence[str]]) -> None:
    """Run commands of this package, as many at a time as there are cores, and print their output.

    Each has one thread: small models gain little from a second one. When one fails, all are stopped.

    Raises:
        ValueError: a command failed; its message has been printed.
    """
    running, failed, stopped = list[subprocess.Popen[str]](), list[str](), Event()

    def stop() -> None:
        stopped.set()
        for process in running:
            process.terminate()

    def run(name: str) -> None:
        if stopped.is_set():
            return
        process = subprocess.Popen(
            [sys.executable, "-m", "torchrl_lang", *commands[name]],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        if stopped.is_set():  # meanwhile
            process.terminate()
        for line in process.stdout or ():
            if not stopped.is_set():  # the demo prints one message for all
                print(line, end="", flush=True)
        if process.wait() and not stopped.is_set():
            failed.append(name)
            stop()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # its end waits for the checkpoints that stopped commands write
        try:
            list(pool.map(run, commands))
        except KeyboardInterrupt:
            stop()
            raise
    if failed:
        raise ValueError(f"training {' and '.join(failed)} failed; its message is above.")


_TEMPERATURES = (0.2, 0.5, 1.0)
_CANDIDATES = (4, 8, 16)


class PlannedRun(NamedTuple):
    """A run to train, unless it has finished."""

    method: str
    out: Path
    options: Mapping[str, Any]
    """Of ``train``, by name."""

    @property
    def finished(self) -> bool:
        """Whether its model is there."""
        return (self.out / "model").exists()

    def command(self) -> list[str]:
        """The arguments of the package's command line.

        Examples:
            >>> from pathlib import Path
            >>> from torchrl_lang.recipes.compare import PlannedRun
            >>> " ".join(PlannedRun("best-10", Path("run"), {"data": "games", "steps": 9}).command())
            'train bc --fraction 0.1 --out run --data games --steps 9'
        """
        words = ["train", *METHODS[self.method].train, "--out", self.out]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        return [str(word) for word in words]


def planned_runs(methods: Sequence[str], out: Mapping[str, Path], options: Mapping[str, Any]) -> list[PlannedRun]:
    """The runs of some methods, and of those that they start from; methods with values first: they take longest.

    Args:
        methods: names in :data:`METHODS`.
        out: the folder of each method's run.
        options: of ``train`` for all of them.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.compare import planned_runs
        >>> from torchrl_lang.recipes.demo_options import METHODS
        >>> [run.method for run in planned_runs(["chai"], {name: Path(name) for name in METHODS}, {"data": "games"})]
        ['chai', 'bc']
    """
    wanted = {*methods, *(start for name in methods if (start := METHODS[name].start))}
    runs = []
    for name in reversed([name for name in METHODS if name in wanted]):
        start = METHODS[name].start
        runs.append(PlannedRun(name, out[name], {**options, **({} if start is None else {"start": out[start]})}))
    return runs


def train_missing(runs: Sequence[PlannedRun]) -> None:
    """Train the runs that have not finished, as many at a time as there are cores; each after the one it starts from.

    Raises:
        ValueError: a training failed; its message has been printed.
    """
    missing = {str(run.out): run for run in runs if not run.finished}
    for later in (False, True):
        chosen = {name: run for name, run in missing.items() if (METHODS[run.method].start is not None) == later}
        if chosen:
            run_in_parallel({name: run.command() for name, run in chosen.items()})


def decodings(
    finished: FinishedRun,
    *,
    by_values: bool = True,
    temperatures: Sequence[float] = _TEMPERATURES,
    guided_temperatures: Sequence[float] = (),
    betas: Sequence[float] = BETAS,
    min_p: float | None = None,
    seed: int = 0,
) -> Iterator[tuple[str, TensorDictModuleBase]]:
    """All ways to decode a run: what the algorithm prescribes, with each strength, and imitation in each way.

    Args:
        finished: the run.
        by_values: whether its values decode, if it has some.
        temperatures: of sampling.
        guided_temperatures: of sampling by values, too: where varied utterances are wanted, the likeliest one is not
            enough.
        betas: weights of values that are added to the logits; other kinds of values have weights of their own.
        min_p: by values only write tokens with at least this probability under the language model, relative to the
            likeliest one's: the values of tokens that the data never have there are not learned.
        seed: of sampling.
    """
    if finished.has_values and by_values:
        limits: dict[str, Any] = {} if min_p is None else {"min_p": min_p}
        for beta in betas if finished.betas == BETAS else finished.betas:
            yield f"greedy, beta {beta:g}", finished.policy(beta, method="greedy", **limits)
            for temperature in guided_temperatures:
                policy = finished.policy(beta, seed=seed, temperature=temperature, **limits)
                yield f"sampled at {temperature:g}, beta {beta:g}", policy
        return
    if "best_of" in finished.methods:
        for candidates in _CANDIDATES:
            yield f"best of {candidates}", finished.policy(method="best_of", seed=seed, candidates=candidates)
        return
    returns = finished.model.heads.get("returns")
    targets = sorted({returns.target, returns.high}) if isinstance(returns, ReturnEmbedding) else [None]
    for target in targets:
        asked: dict[str, Any] = {} if target is None else {"target_return": target}
        about = "" if target is None else f", return {target:.2f}"
        yield f"greedy{about}", finished.policy(method="greedy", **asked)
        for temperature in temperatures:
            yield f"sampled at {temperature:g}{about}", finished.policy(seed=seed, temperature=temperature, **asked)


CHOICE, REPORT = ("val", 1_000_000), ("test", 2_000_000)
"""Split on which a decoding is chosen, and the one that is reported, each with the seed of games and sampling there."""


class _Kept(Record):
    """Figures of games by the name of the player or of the decoding."""

    summaries: dict[str, Summary]


def kept(path: Path, measure: Callable[[], Mapping[str, Summary]]) -> dict[str, Summary]:
    """Figures of games by name, measured once and read from a file."""
    if not path.exists():
        _Kept(summaries=dict(measure())).write(path)
    return _Kept.read(path, remedy="delete it: the games are played again").summaries


@dataclass(frozen=True)
class TrainedPlayer(ABC):
    """A finished run and the figures of its games, which are kept in a folder.

    Args:
        run: folder of the run.
        method: its name in :data:`~torchrl_lang.recipes.demo_options.METHODS`.
        home: folder of the figures.
        seed: of training.
    """

    run: Path
    method: str
    home: Path
    seed: int

    @abstractmethod
    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name."""

    @abstractmethod
    def play(self, policy: TensorDictModuleBase, place: tuple[str, int]) -> Summary:
        """Figures of a way to decode, on games of a split with the seed there."""

    @abstractmethod
    def choose(self, found: Mapping[str, Summary]) -> str:
        """The decoding to report, by the figures of all of them."""

    @cached_property
    def finished(self) -> FinishedRun:
        """The run, opened when it is first needed."""
        return load_run(self.run)

    @cached_property
    def policies(self) -> Mapping[str, TensorDictModuleBase]:
        """All ways to decode the run, by name."""
        return dict(self.ways())

    @cached_property
    def measured(self) -> Mapping[str, Summary]:
        """Figures of each way to decode, on validation games."""
        file = self.home / "choice.json"
        return kept(file, lambda: {name: self.play(each, CHOICE) for name, each in self.policies.items()})

    @property
    def best(self) -> str:
        """The decoding that is reported."""
        return self.choose(self.measured)

    @cached_property
    def reported(self) -> Summary:
        """Figures of the best decoding on test games."""
        best = self.best
        return kept(self.home / "test.json", lambda: {best: self.play(self.policies[best], REPORT)})[best]


@dataclass(frozen=True)
class Row:
    """A player of a table: the figures of its games for each training seed, and how they were decoded.

    Examples:
        >>> from torchrl_lang.evaluation import Summary
        >>> from torchrl_lang.recipes.compare import Row
        >>> found = [Summary("", 100, value, 0.05, 0.5, 0.05, 3.0) for value in (-2.0, -1.0)]
        >>> mean = Row("BC", found, ["greedy", "greedy"]).summary
        >>> mean.name, mean.games, mean.mean_return, mean.return_error
        ('BC, greedy', 200, -1.5, 0.5)
    """

    title: str
    summaries: Sequence[Summary]
    decodings: Sequence[str] = ()
    """None for a player that was not trained."""

    @property
    def returns(self) -> SeedSummary:
        """The mean return; the name has the decoding if all seeds have the same."""
        name = f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title
        return over_seeds(name, [each.mean_return for each in self.summaries])

    @property
    def summary(self) -> Summary:
        """The mean over seeds; with several of them the return's standard error is that over seeds."""
        first, returns, games = self.summaries[0], self.returns, sum(each.games for each in self.summaries)
        if returns.error is None:
            return replace(first, name=returns.name)
        won, turns = (fmean(getattr(each, name) for each in self.summaries) for name in ("win_rate", "mean_turns"))
        entropies = [each.entropy for each in self.summaries if each.entropy is not None]
        metrics = {name: fmean(each.metrics[name] for each in self.summaries) for name in first.metrics}
        figures = (games, returns.mean, returns.error, won, math.sqrt(won * (1 - won) / games), turns)
        return Summary(returns.name, *figures, entropy=fmean(entropies) if entropies else None, metrics=metrics)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        seeds = [each.as_dict() for each in self.summaries]
        return {**self.summary.as_dict(), "decodings": list(self.decodings), "seeds": seeds}


def compared(players: Sequence[TrainedPlayer], title: str | None = None) -> Row:
    """The row of the runs of all training seeds."""
    found = [player.reported for player in players]
    return Row(title or METHODS[players[0].method].title, found, [player.best for player in players])


def format_rows(rows: Sequence[Row]) -> str:
    """A table of players, and with several seeds the return of each."""
    seeds = [row.returns for row in rows if len(row.summaries) > 1]
    table = format_table([row.summary for row in rows])
    return f"{table}\n\n{format_seed_table(seeds, title='return')}" if seeds else table


def publish(
    options: Any, began: float, report: str, figures: Mapping[Any, Any], *, files: str = "report and all figures"
) -> None:
    """Write the report and the figures of a comparison, then print the report: a closed output loses nothing.

    Args:
        options: of the comparison.
        began: when the call began, by the monotonic clock.
        report: the text.
        figures: further entries of ``results.json``.
        files: what lies in the folder, in words.
    """
    minutes = (time.monotonic() - began) / 60
    about = {"options": plain(options), "minutes_of_this_call": round(minutes, 2)}
    write_json(options.out / "results.json", {**about, **figures})
    write_file(options.out / "report.txt", report + "\n")
    print(f"\n{report}\n\n{files}: {options.out}; {minutes:.1f} minutes", flush=True)
