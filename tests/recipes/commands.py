"""Run commands in this process, interrupt them as Ctrl-C would, and look at what they print and leave."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torchrl_lang.__main__ import main
from torchrl_lang.recipes import compare
from torchrl_lang.recipes.tasks import task_from_notes
from torchrl_lang.recipes.tasks.base import Task


def words_of(options: dict[str, Any]) -> list[str]:
    """Options by name as the words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchrl_lang: ")
    assert error.count("\n") == 1
    return error


@contextmanager
def interrupted_at(owner: Any, name: str, number: int) -> Iterator[None]:
    """What runs within is interrupted instead of its ``number``-th call of a function or method."""
    real, calls = getattr(owner, name), 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield


class Trainings:
    """Trains in this process, and remembers what."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.done: list[str] = []
        self.stop_after = stop_after

    def __call__(self, commands: dict[str, list[str]]) -> None:
        for out, words in commands.items():
            if len(self.done) == self.stop_after:
                raise KeyboardInterrupt
            assert main(words) == 0
            self.done.append(Path(out).name)

    def take_over(self, patch: pytest.MonkeyPatch, owner: Any = compare) -> None:
        """Train what commands of the module ``owner`` plan from now on."""
        patch.setattr(owner, "run_in_parallel", self)


def recorded_evaluations(task: type, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Split, seed and number of games of each evaluation from now on, outside of trainings."""
    calls, real = [], task.evaluate

    def evaluate(self: Any, policy: Any, **options: Any) -> Any:
        if options.get("split"):
            calls.append((options["split"], options["seed"], options["games"]))
        return real(self, policy, **options)

    monkeypatch.setattr(task, "evaluate", evaluate)
    return calls


def from_own_notes(task: Task, /, **change: Any) -> Task:
    """The task that is read from a task's notes as JSON, some of them changed."""
    notes = json.loads(json.dumps(task.notes())) | change
    return task_from_notes(notes, Path("manifest.json"))


def log_of(run: Path) -> list[dict[str, str]]:
    """The rows of a log, but for seconds."""
    with open(run / "log.csv", newline="") as file:
        return [{key: value for key, value in row.items() if "second" not in key} for row in csv.DictReader(file)]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's model and of its heads."""
    files = (run / "model").glob("*.safetensors")
    return {f"{file.name}:{key}": value for file in files for key, value in load_file(file).items()}


def assert_same(one: Any, other: Any) -> None:
    """Both have the same keys and equal tensors."""
    assert one.keys() == other.keys()
    for key in one.keys():
        assert torch.equal(one[key], other[key]), key


def assert_same_runs(one: Path, other: Path) -> None:
    """Both have the same weights and logs."""
    assert_same(weights_of(one), weights_of(other))
    assert log_of(one) == log_of(other)


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run."""
    return list((run / "checkpoints").glob("step-*"))
