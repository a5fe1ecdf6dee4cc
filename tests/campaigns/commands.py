"""The command line as a user calls it, with tiny sizes; and how its ending is classified."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.isolation import captured
from torchrl_lang.__main__ import main

MODEL = ["--layers", "1", "--width", "8", "--heads", "2", "--batch-size", "8", "--eval-games", "4"]
MODEL += ["--log-every", "1", "--eval-every", "1"]
ONLINE = ["--iterations", "3", "--games", "4", "--turns", "3", "--batch-size", "4", "--eval-every", "1"]
ONLINE += ["--eval-games", "4", "--kl-horizon", "16"]
ANSWERS = "y\n" * 100
"""Given on standard input: whatever a library asks, a user may say yes."""

_PROGRESS = re.compile(r"\S+: \d+/\d+ |.*(episode/s|\?episode)|^\S+: best at ")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int | None
    """The exit status, ``None`` where an exception came out of it."""
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """Lines of standard error that are no progress report."""
        return [line for line in re.split(r"[\r\n]+", self.err) if line.strip() and not _PROGRESS.match(line)]

    @property
    def refusal(self) -> str | None:
        """The line with which the command refused its input, or ``None``."""
        lines = [line for line in self.complaints if line.startswith("torchrl_lang: ")]
        return lines[-1] if self.status == 2 and lines else None


def run_program(arguments: Sequence[str]) -> int:
    """Run a command as ``python -m torchrl_lang`` does, with its handlers of signals, in this process."""
    sys.argv[1:] = arguments
    sys.modules.pop("torchrl_lang.__main__", None)
    runpy.run_module("torchrl_lang", run_name="__main__")
    return 0


def call(arguments: Iterable[object], run: Callable[[Sequence[str]], int] = main) -> Ended:
    """Run a command in this process, by the function or as the program."""
    with captured(ANSWERS) as streams:
        try:
            status: int | None = run([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            status = None
    return Ended(status, streams.out, streams.err)


def call_in_subprocess(arguments: Iterable[object]) -> Ended:
    """Run a command as a program of its own."""
    command = [sys.executable, "-m", "torchrl_lang", *map(str, arguments)]
    ended = subprocess.run(command, input=ANSWERS, capture_output=True, text=True, errors="replace", timeout=120)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def generate(out: Path, words: Path, *more: object) -> list[object]:
    return ["generate", "wordle", "--out", out, "--games", 16, "--words", words, "--batch", 8, *more]


def train(recipe: str, data: Path, out: Path, *more: object) -> list[object]:
    return ["train", recipe, "--data", data, "--out", out, *MODEL, "--steps", 3, *more]


def train_online(recipe: str, start: Path, out: Path, *more: object) -> list[object]:
    options = [*ONLINE, "--value-warmup", "1"] if recipe == "ppo" else ONLINE
    return ["train", recipe, "--start", start, "--out", out, *options, *more]


def evaluate(run: Path, *more: object) -> list[object]:
    return ["evaluate", "--run", run, "--games", 2, "--no-plots", *more]


def problem_of_refusal(ended: Ended, names: Iterable[str]) -> str:
    """What is wrong with the way in which a command refused, or nothing.

    Args:
        names: of files and folders, one of which the message must contain.
    """
    if ended.status is None or "Traceback (most recent call last)" in ended.err:
        return f"a traceback\n{last_lines(ended.err)}"
    if ended.status != 2:
        return f"exit status {ended.status}\n{last_lines(ended.err)}"
    if len(ended.complaints) != 1 or ended.refusal is None:
        return f"{len(ended.complaints)} lines instead of one\n{last_lines(ended.err)}"
    if len(ended.refusal) > 1500:
        return f"a line of {len(ended.refusal)} characters\n{ended.refusal[:300]}"
    if not any(name in ended.refusal for name in names):
        return f"no file is named\n{ended.refusal}"
    return ""


def last_lines(text: str, number: int = 12) -> str:
    return "\n".join(line[:300] for line in text.strip().splitlines()[-number:])


def environment() -> dict[str, str]:
    """The variables for a subprocess that imports the same code as this process."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
