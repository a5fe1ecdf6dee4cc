"""YAML files of options: what they may hold, what overrides them, and that a run can be repeated from its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from torchrl_lang.__main__ import COMMANDS, WHOLE, main
from torchrl_lang._files import FileError, read_tensors
from torchrl_lang.recipes.bc import BC
from torchrl_lang.recipes.config_file import read_config, write_config
from torchrl_lang.recipes.ilql import ILQL
from torchrl_lang.recipes.options import Options, option, pairs
from torchrl_lang.recipes.ppo import PPO
from torchrl_lang.recipes.rejection import Rejection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everything(Options):
    """Each kind of option."""

    path: Path = option(Path("x"), "a path")
    kind: Literal["a", "b"] = option("a", "a choice")
    flag: bool = option(True, "a switch")
    name: str = option("", "a text")
    maybe: int | None = option(None, "a number or none", at_least=0)
    perhaps: Literal["c", "d"] | None = option(None, "a choice or none")
    share: float = option(0.5, "a share", above=0, at_most=1)
    many: tuple[float | Literal["auto"], ...] = option((1.0,), "numbers", at_least=0)
    some: tuple[str, ...] = option((), "texts")
    option: dict[str, Any] = pairs("names with values")


def read(tmp_path, text, options=Everything):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return read_config(path, options)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("path: a/b", {"path": Path("a/b")}),
        ("kind: b\nflag: false", {"kind": "b", "flag": False}),
        ("name: 100", {"name": "100"}),
        ("maybe: 3\nperhaps: d", {"maybe": 3, "perhaps": "d"}),
        ("maybe: null\nperhaps: none", {"maybe": None, "perhaps": None}),
        ("maybe: None", {"maybe": None}),
        ("share: 1e-3", {"share": 0.001}),  # a text in YAML
        ("share: 1", {"share": 1.0}),
        ("many: [0, 2.5, auto]", {"many": (0.0, 2.5, "auto")}),
        ("many: [1e1]", {"many": (10.0,)}),
        ("some: []", {"some": ()}),
        ("option: {a: [1, null], b: {c: x}}", {"option": {"a": [1, None], "b": {"c": "x"}}}),
    ],
)
def test_values_of_every_type(tmp_path, text, values):
    found = read(tmp_path, text)
    assert found == values
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in values.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "steps: 1",
            "has the unknown key 'steps': the options are path, kind, flag, name, maybe, perhaps, share, many",
        ),
        ("7: 1", "has the unknown key 7"),
        ("flag: 1", 'has 1 as "flag": expected true or false'),
        ("flag: 'yes'", "has 'yes' as \"flag\": expected true or false"),
        ("kind: c", "has 'c' as \"kind\": expected one of a, b"),
        ("maybe: 1.5", 'has 1.5 as "maybe": expected a whole number or none, at least 0'),
        ("maybe: true", 'has True as "maybe": expected a whole number or none'),
        ("maybe: '3'", "has '3' as \"maybe\": expected a whole number or none"),
        ("maybe: -1", 'has -1 as "maybe": maybe must be at least 0, got -1'),
        ("maybe: 10000000000", "maybe must be at least 0 and at most 2147483647, got 10000000000"),
        ("share: 2", 'has 2 as "share": share must be above 0 and at most 1, got 2.0'),
        ("share: .nan", "share must be finite, above 0 and at most 1, got nan"),
        ("share: little", "has 'little' as \"share\": expected a number, above 0 and at most 1"),
        ("share: [0.1]", 'has [0.1] as "share": expected a number'),
        ("many: 1", 'has 1 as "many": expected a list, each item a number or one of auto, at least 0'),
        ("many: [1, often]", "has [1, 'often'] as \"many\": expected a list"),
        ("many: [-1]", "many must be at least 0, got -1.0"),
        ("many: []", 'has [] as "many": many must hold at least one value, got none'),
        ("path: ''", "has '' as \"path\": expected a path"),
        ("path: 1", 'has 1 as "path": expected a path'),
        ("name: true", 'has True as "name": expected a text'),
        ("option: [a]", "has ['a'] as \"option\": expected names with JSON values"),
        ("option: {1: a}", "has {1: 'a'} as \"option\": expected names with JSON values"),
        ("option: {a: 2026-01-01}", '"option": expected names with JSON values'),
        ("- path", "holds ['path'], not names of options with values: give a YAML file with one option per line"),
        ("share", "holds 'share', not names of options"),
        ("share: 1\nshare: 0.5", "is not valid YAML (the key 'share' is repeated"),
        ("option: {a: 1, a: 2}", "is not valid YAML (the key 'a' is repeated"),
        ("share: [", "is not valid YAML (while parsing a flow"),
        ("share: !!python/object/apply:os.system [ls]", "is not valid YAML (could not determine a constructor"),
    ],
)
def test_every_mistake_is_one_error_with_file_and_key(tmp_path, text, message):
    with pytest.raises(FileError) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'options.yaml'} ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_dashes_and_underscores_are_the_same(tmp_path):
    assert read(tmp_path, "batch-size: 8", BC) == read(tmp_path, "batch_size: 8", BC) == {"batch_size": 8}
    with pytest.raises(FileError, match='has the option "batch_size" twice'):
        read(tmp_path, "batch-size: 8\nbatch_size: 8", BC)


@pytest.mark.parametrize(
    "options",
    [
        BC(data=Path("d"), out=Path("o"), lr=1e-12, length_groups=3, logger=("wandb", "mlflow"), tokenizer="100"),
        ILQL(
            data=Path("d.jsonl"), out=Path("o"), system="line\nline: ü", target="mc", task="a.b:c", option={"n": [1.5]}
        ),
        PPO(start=Path("s"), out=Path("o"), kl_target=None, max_staleness=2, detach_value=False),
        Rejection(start=Path("s"), out=Path("o"), best_so_far=5),
    ],
    ids=lambda options: options.preset,
)
def test_a_written_file_gives_the_same_options(tmp_path, options):
    path = tmp_path / "config.yaml"
    write_config(path, options)
    found = read_config(path, type(options))
    assert "out" not in found
    assert type(options)(out=options.out, **found) == options
    assert path.read_text().startswith(
        f"# python -m torchrl_lang train {options.preset} --config config.yaml --out FOLDER"
    )


def recipes():
    grouped = {f"{name} {key}": load for name, (_, group) in COMMANDS.items() for key, load in group.items()}
    return grouped | {name: load for name, (_, load) in WHOLE.items()}


@pytest.mark.parametrize("command", recipes())
def test_every_command_takes_a_file(command, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("no_such_option: 1")
    assert main([*command.split(), "--config", str(tmp_path / "options.yaml")]) == 2
    assert "options.yaml has the unknown key 'no_such_option': the options are" in capsys.readouterr().err


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dataset and a run, both of YAML files."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "data.yaml").write_text(f"out: {folder / 'data'}\nnodes: 10\nmax-turns: 7\ngames: 60\n")
    assert main(["generate", "random_walks", "--config", str(folder / "data.yaml")]) == 0
    options = {"data": str(folder / "data"), "layers": 1, "width": 16, "heads": 2, "batch_size": 8}
    options |= {"steps": 3, "eval_games": 4, "lr": "1e-3", "seed": 5}
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    assert main(["train", "ilql", "--config", str(folder / "run.yaml"), "--out", str(folder / "run")]) == 0
    return folder


def weights(run):
    return {
        f"{file}:{key}": value.tolist()
        for file in ("model.safetensors", "heads.safetensors")
        for key, value in read_tensors(run / "model" / file, remedy="").items()
    }


def test_a_run_is_repeated_from_its_own_file(home, tmp_path, capsys):
    again = ["train", "ilql", "--config", str(home / "run" / "config.yaml")]
    assert main(again) == 2
    assert "the following arguments are required: --out" in capsys.readouterr().err
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert weights(tmp_path / "again") == weights(home / "run")
    assert (tmp_path / "again" / "config.yaml").read_text() == (home / "run" / "config.yaml").read_text()
    assert main([*again, "--out", str(home / "run")]) == 0  # continues the run, which has finished


def test_the_line_overrides_the_file_and_the_file_the_preset(home, tmp_path):
    written = json.loads((home / "run" / "config.json").read_text())
    assert (written["lr"], written["seed"], written["tau"]) == (0.001, 5, 0.05)  # the task's preset
    (tmp_path / "tau.yaml").write_text((home / "run.yaml").read_text() + "tau: 0.5\n")
    run = ["train", "ilql", "--config", str(tmp_path / "tau.yaml"), "--out", str(tmp_path / "run"), "--seed", "6"]
    assert main(run) == 0
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["lr"], written["seed"], written["tau"]) == (0.001, 6, 0.5)


def test_evaluate_takes_a_file(home, tmp_path):
    (tmp_path / "evaluate.yaml").write_text(f"run: {home / 'run'}\nbeta: [0, 1]\ngames: 4\n")
    assert main(["evaluate", "--config", str(tmp_path / "evaluate.yaml")]) == 0
    players = json.loads((home / "run" / "evaluation.json").read_text())["players"]
    assert [player["name"] for player in players][-1] == "run beta 1 greedy"


def test_a_file_never_imports_a_task(home, tmp_path, monkeypatch, capsys):
    """Also not the file of a run, which may come from somebody else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trap_in_yaml.py").write_text("raise BaseException('imported')\n")
    (tmp_path / "run.yaml").write_text((home / "run.yaml").read_text() + "task: trap_in_yaml:make_env\n")
    run = ["train", "ilql", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")]
    assert main(run) == 2
    assert "add --task trap_in_yaml:make_env" in capsys.readouterr().err
    assert main([*run, "--task", "random_walks"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml is missing: give a YAML file"),
        (["--config", ""], "argument --config: expected a path, got an empty text"),
        (["--config"], "argument --config: expected one argument"),
    ],
)
def test_files_that_are_not_there(more, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "bc", *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_one_file_at_a_time(home, capsys):
    file = str(home / "run.yaml")
    assert main(["train", "ilql", "--config", file, "--config", file, "--out", "x"]) == 2
    assert "--config was given twice" in capsys.readouterr().err
