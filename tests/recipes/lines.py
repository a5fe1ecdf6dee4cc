"""What tests of commands look at: the line of a refusal, the log of a run, its weights."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torchrl_lang.__main__ import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that a command ends with."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchrl_lang: ")
    assert error.count("\n") == 1
    return error


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


def wait_until(condition: Callable[[], Any], seconds: float = 200) -> Any:
    """What is found of a condition, as soon as it holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run."""
    return list((run / "checkpoints").glob("step-*"))
