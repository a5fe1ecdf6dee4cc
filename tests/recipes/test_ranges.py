"""Options outside their range end in one line that names the option, the value and what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from torchrl_lang.__main__ import COMMANDS, WHOLE, main
from torchrl_lang.recipes.options import Options, option, with_defaults
from torchrl_lang.recipes.ranges import Range


@dataclasses.dataclass(frozen=True)
class Numbers(Options):
    steps: int = option(10, "at least one", at_least=1)
    share: float = option(0.5, "a share", above=0, at_most=1)
    shift: float = option(0.0, "any finite number")
    cap: int | None = option(None, "a number or none", at_least=0, below=5)
    many: tuple[float, ...] = option((1.0,), "some", at_least=0)
    names: tuple[str, ...] = option((), "may be empty")
    kind: Literal["a", "b"] | None = option(None, "a choice or none")
    flag: bool = option(False, "a switch")


@with_defaults(steps=20)
class More(Numbers):
    """Keeps the ranges of its base."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"steps": 10**30}, f"steps must be at least 1 and at most 2147483647, got {10**30}."),
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0.0."),
        ({"share": 1.5}, "share must be above 0 and at most 1, got 1.5."),
        ({"share": float("nan")}, "share must be finite, above 0 and at most 1, got nan."),
        ({"shift": float("-inf")}, "shift must be finite, got -inf."),
        ({"cap": 5}, "cap must be at least 0 and below 5, got 5."),
        ({"many": (1.0, -1.0)}, "many must be at least 0, got -1.0."),
        ({"many": ()}, "many must hold at least one value, got none."),
        ({"kind": "c"}, "kind must be one of a, b, got 'c'."),
    ],
)
@pytest.mark.parametrize("options", [Numbers, More])
def test_values_out_of_range(options, values, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        options(**values)
    assert str(raised.value) == message


def test_values_at_the_ends():
    options = More(steps=1, share=1.0, shift=-1e30, cap=0, many=(0.0, 1e9), names=(), kind="b")
    assert (options.share, options.cap, options.kind) == (1.0, 0, "b")


def recipes():
    grouped = {f"{name} {key}": load for name, (_, group) in COMMANDS.items() for key, load in group.items()}
    return grouped | {name: load for name, (_, load) in WHOLE.items()}


@pytest.mark.parametrize("load", recipes().values(), ids=recipes().keys())
def test_every_number_of_every_recipe_has_a_range(load):
    options, _ = load()
    assert issubclass(options, Options)
    for field in dataclasses.fields(options):
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        if any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            allowed = field.metadata["range"]
            assert allowed != Range(), field.name
            assert all(value in allowed for value in values if value is not None)


def train(*more):
    return ["train", "ilql", "--data", "data", "--out", "run", *more]


def ppo(*more):
    return ["train", "ppo", "--start", "bc", "--out", "run", *more]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (train("--batch-size", "0"), "batch_size must be at least 1, got 0"),
        (train("--cql-weight", "nan"), "cql_weight must be finite, at least 0, got nan"),
        (train("--cql-weight", "-1"), "cql_weight must be at least 0, got -1.0"),
        (train("--beta", "inf"), "beta must be finite, at least 0, got inf"),
        (train("--lr", "1e30"), "lr must be above 0 and at most 1, got 1e+30"),
        (train("--fraction", "2"), "fraction must be above 0 and at most 1, got 2.0"),
        (train("--width", "15", "--heads", "2"), "width must be a multiple of heads, got width=15 and heads=2"),
        (train("--device", "nonsense"), "device='nonsense' cannot be used here"),
        (train("--device", "meta"), "device='meta' cannot be used here"),
        (train("--logger", "nonsense"), "logger='nonsense' is unknown"),
        (train("--seed", "-1"), "seed must be at least 0, got -1"),
        (train("--steps", "ten"), "argument --steps: invalid int value: 'ten'"),
        (train("--out", ""), "argument --out: expected a path, got an empty text"),
        (train("--optimizer", "sgd"), "argument --optimizer: invalid choice: 'sgd'"),
        (ppo("--accumulate", "1000"), "accumulate=1000 batches never come together: an iteration has at most 48"),
        (ppo("--temperature", "0"), "temperature must be above 0, got 0.0"),
        (["generate", "wordle", "--out", "x", "--batch", "0"], "batch must be at least 1, got 0"),
        (["generate", "textworld", "--out", "x", "--level", "301"], "There is no level 301 of coin_collector"),
        (["evaluate", "--run", "x", "--beta", "1", "nan"], "beta must be finite, at least 0, got nan"),
        (["demo", "--betas"], "argument --betas: expected at least one argument"),
        (["demo", "--words", "3000"], "words must be at least 1 and at most 2250, got 3000"),
        (["trian"], "argument command: invalid choice: 'trian'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_the_command_line_says_so_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchrl_lang: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path().iterdir())


def test_help_says_what_is_allowed(capsys):
    assert main(["train", "bc", "--help"]) == 0
    assert "(default: 64; at least 1; wordle: 32; textworld: 32; visual_dialogue: 32; reddit: 32)" in " ".join(
        capsys.readouterr().out.split()
    )
