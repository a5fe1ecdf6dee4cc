"""Options of recipes: their types and ranges, words of a command line, YAML files, help, and errors of one line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from tests.recipes.commands import assert_same_runs, refused
from torchrl_lang.__main__ import OF_TASKS, RECIPES, attribute, main
from torchrl_lang._files import FileError
from torchrl_lang.recipes.algorithms import BC, CQL, ILQL, PPO, PercentBC
from torchrl_lang.recipes.command_line import UsageError, parse
from torchrl_lang.recipes.options import Options, option, pairs, read_config, with_defaults, write_config
from torchrl_lang.recipes.tasks import TASKS, options_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everything(Options):
    """Each kind of option."""

    path: Path = option(Path("x"), "a path")
    kind: Literal["a", "b"] = option("a", "a choice")
    flag: bool = option(True, "a switch")
    name: str = option("", "a text")
    maybe: int | None = option(None, "a number or none", ge=0, lt=5)
    perhaps: Literal["c", "d"] | None = option(None, "a choice or none")
    share: float = option(0.5, "a share", gt=0, le=1)
    shift: float = option(0.0, "any finite number")
    steps: int = option(10, "a count", ge=1)
    many: tuple[float | Literal["auto"], ...] = option((1.0, 2.0), "numbers", ge=0)
    some: tuple[str, ...] = option((), "texts")
    option: dict[str, Any] = pairs("names with values")


@with_defaults(steps=20)
class More(Everything):
    """Keeps the ranges of its base."""


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "--steps"),
    ({"steps": True}, "--steps"),
    ({"share": 0.0}, "--share"),
    ({"share": 1.5}, "--share"),
    ({"share": float("nan")}, "--share"),
    ({"shift": float("-inf")}, "--shift"),
    ({"maybe": 5}, "--maybe"),
    ({"many": [1.0, -1.0]}, "--many"),
    ({"many": []}, "--many"),
    ({"many": [1, "often"]}, "--many"),
    ({"kind": "c"}, "--kind should be 'a' or 'b', got c."),
    ({"path": ""}, "--path"),
    ({"name": True}, "--name"),
    ({"flag": "perhaps"}, "--flag"),
    ({"option": "a"}, "--option"),
]


def test_a_wrong_value_is_named_as_the_command_line_writes_it(tmp_path):
    path = tmp_path / "options.yaml"
    for values, message in VALUES:
        for kind in (Everything, More):
            with pytest.raises(ValueError, match=message) as raised:
                kind(**values)
            assert "\n" not in str(raised.value)
        path.write_text(yaml.safe_dump(values))
        with pytest.raises(FileError, match=f"options.yaml.*{message}"):
            read_config(path, Everything)


WORDS = (
    "--path y --kind b --no-flag --name 100 --maybe none --perhaps d --share 1e-2 --shift -3 --many 4 auto --some f e "
    '--option a=1 b={"c":[true]} --option d=x'
)
EXPECTED: dict[str, Any] = {
    "path": Path("y"),
    "kind": "b",
    "flag": False,
    "name": "100",
    "maybe": None,
    "perhaps": "d",
    "share": 0.01,
    "shift": -3.0,
    "many": (4.0, "auto"),
    "some": ("f", "e"),
    "option": {"a": 1, "b": {"c": [True]}, "d": "x"},
}


def test_words_of_every_kind():
    assert parse(Everything, [], "x") == Everything()
    found = parse(Everything, WORDS.split(), "x")
    assert found == Everything(**EXPECTED)
    assert {name: type(getattr(found, name)) for name in EXPECTED} == {n: type(v) for n, v in EXPECTED.items()}
    assert parse(Everything, ["--maybe", "3", "--path=z"], "x") == Everything(maybe=3, path=Path("z"))


def test_a_file_of_every_kind(tmp_path):
    path = tmp_path / "options.yaml"
    text = "path: y\nkind: b\nflag: false\nname: 100\nmaybe: None\nperhaps: d\nshare: 1e-2\nshift: -3\n"
    path.write_text(text + "many: [4, auto]\nsome: [f, e]\noption: {a: 1, b: {c: [true]}, d: x}\n")
    assert read_config(path, Everything) == EXPECTED
    assert parse(Everything, ["--config", str(path), "--kind", "a"], "x") == Everything(**{**EXPECTED, "kind": "a"})
    path.write_text("")
    assert read_config(path, Everything) == {}
    path.write_text("batch-size: 8")
    assert read_config(path, BC) == {"batch_size": 8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--step 3", "no option --step; did you mean --steps?"),  # never taken for --steps
        ("--stepz=3", "no option --stepz; did you mean --steps?"),
        ("stray", "'stray' belongs to no option"),
        ("--steps", "--steps takes one value, got none"),
        ("--steps 1 2", "--steps takes one value, got 1 2"),
        ("--option x", "--option should be name=value"),
        ("--option a=1 --option a=2", "--option has a twice"),
        ("--config nowhere.yaml", "nowhere.yaml is missing"),
        ("step: 1", "no option --step; did you mean --steps"),
        ("- path", "holds .'path'., not names of options"),
        ("option: {a: 1, a: 2}", "the key 'a' is repeated"),
        ("share: [", "is not valid YAML"),
        ("max-steps: 8\nmax_steps: 8", "the key 'max_steps' is repeated"),
        ("share: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_wrong_words_and_files(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("options.yaml").write_text(given)
    words = given.split() if given.startswith("--") or given == "stray" else ["--config", "options.yaml"]
    with pytest.raises((ValueError, FileError), match=message.replace("?", r"\?")):
        parse(Everything, words, "x")


def test_required_options_may_stand_in_the_file(tmp_path):
    with pytest.raises(UsageError, match="--out is missing"):
        parse(BC, ["--data", "d"], "x")
    (tmp_path / "run.yaml").write_text("out: o")
    assert parse(BC, ["--data", "d", "--config", str(tmp_path / "run.yaml")], "x").out == Path("o")


@pytest.mark.parametrize(
    "options",
    [
        CQL(data=Path("d"), out=Path("o"), lr=1e-12, length_groups=3, logger=("wandb", "mlflow"), tokenizer="100"),
        ILQL(data=Path("d.jsonl"), out=Path("o"), system="line\nline: ü", target="mc", task="a.b:c", option={"n": 1.5}),
        PPO(start=Path("s"), out=Path("o"), kl_target=None, max_staleness=2, detach_value=False),
        PercentBC(data=Path("d"), out=Path("o")),
    ],
    ids=lambda options: options.algorithm,
)
def test_a_written_file_gives_the_same_options(tmp_path, options):
    path = tmp_path / "config.yaml"
    write_config(path, options)
    found = read_config(path, type(options))
    assert "out" not in found
    assert type(options)(out=options.out, **found) == options
    assert path.read_text().startswith(f"# python -m torchrl_lang train {options.algorithm} --config config.yaml")


def kinds():
    found = {f"{command} {task}": options_of(task, command) for command in OF_TASKS for task in TASKS}
    return found | {name: attribute(options) for name, (options, _) in RECIPES.items()}


def test_every_command_has_a_help(capsys):
    for command, kind in kinds().items():
        fields = dataclasses.fields(kind)
        for field in fields:
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            if any(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
                assert field.metadata["range"], (command, field.name)
        assert main([*command.split(), "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80, command
        assert all(any(f"--{field.name.replace('_', '-')}" in line for line in lines) for field in fields), command


@pytest.mark.slow
def test_a_help_text_imports_no_torch():
    code = "import sys; from torchrl_lang.__main__ import main; main(['train', 'ilql', '--help'])"
    code += "; main(['distill', '--help']); main(['plan', '--model', 'gpt-2']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_help_text_shows_ranges_presets_and_groups(capsys):
    assert main(["train", "ilql", "--help"]) == 0
    said = capsys.readouterr().out
    groups = [f" {name} options " for name in ("data", "model", "optimisation", "loss", "evaluation", "run")]
    places = [said.index(group) for group in groups]
    assert places == sorted(places)
    assert main(["train", "ad", "--help"]) == 0
    assert "--template" in capsys.readouterr().out.partition(" run options ")[2]
    plain = " ".join(re.sub(r"[│|]", " ", said).split())
    assert (
        "(default: 64; at least 1; wordle: 32; textworld: 32; visual_dialogue: 32; reddit: 32; pretrained: 16)" in plain
    )


TRAIN = "train ilql --data data --out run"
PPO_FROM = "train ppo --out run --start start"
GRPO_FROM = "train grpo --out run --start start"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{TRAIN} --lr 1e30", "--lr should be less than or equal to 1, got 1e30"),
        (f"{TRAIN} --width 15", "--width must be a multiple of --heads 4, got 15"),
        (f"{TRAIN} --start a --pretrained b", "Give one of --start a and --pretrained b"),
        (f"{TRAIN} --lora-rank 2", "trains adapters of a model that exists"),
        (f"{TRAIN} --pretrained x --lora-layers 2", "give their --lora-rank, too"),
        (f"{TRAIN} --pretrained x --dtype float16", "Small gradients are 0 in --dtype float16"),
        (f"{TRAIN} --logger wandbb", "--logger should be 'tensorboard', 'wandb', 'mlflow' or 'trackio'"),
        ("train dpo --data d --out x --beta 0.1", "no option --beta; did you mean --reward-scale?"),
        ("train bc --data nowhere --out x", "There is no dataset in nowhere"),
        ("evaluate --run nowhere", "There is no run in nowhere"),
        (PPO_FROM, "There is no run in start"),
        (f"{PPO_FROM} --collector sync --games 4 --workers 3", "--games 4 cannot be shared out to 3 workers"),
        (f"{PPO_FROM} --kl-coef 0", "--kl-coef 0 needs --kl-target none, or a --kl-weight: no"),
        (f"{PPO_FROM} --kl-weight 0.1", "got --kl-coef 0.2 and --kl-weight 0.1: set one of them to 0"),
        (f"{PPO_FROM} --lora-rank 2 --top-layers 1", "Give one of --lora-rank"),
        (f"{PPO_FROM} --curriculum 5 --collector async", "--curriculum draws games in this process"),
        (f"{PPO_FROM} --engine transformers --collector sync", "--engine plays in this process: leave out --collector"),
        (f"{PPO_FROM} --engine transformers --lora-rank 2", "--engine has whole weights, no adapters: leave out"),
        (f"{PPO_FROM} --max-engine-weight 2", "--max-engine-weight is about an inference engine"),
        (f"{PPO_FROM} --engine-option dtype=float32", "--engine-option is about an inference engine"),
        (f"{GRPO_FROM} --games 20 --group-size 8", "--games 20 is no multiple of --group-size"),
        (f"{GRPO_FROM} --games 16 --collector sync --group-size 16", "2 workers with groups of 16"),
        (f"{GRPO_FROM} --group-size 1", "grpo compares games of the same start"),
        (f"{GRPO_FROM} --max-staleness 1", "--max-staleness drops single games"),
        (f"{GRPO_FROM} --kl-coef 0.1", "got --kl-coef 0.1 and --kl-weight 0.04: set one of them to 0"),
        ("train reinforce++ --out run --start start --drop-equal", "reinforce++ compares games of the same start"),
        ("train rloo --out run --start start --curriculum 1", "--curriculum should be greater than or equal to 2"),
        ("generate wordle --out x --words 0", "number of words must lie in [1, "),
        ("generate wordle --out x --words no/file.txt", "no/file.txt is missing"),
        ("generate wordle --out x --words ²", "² is missing"),
        ("generate wordle --out x --make human", "--make human needs --tweets"),
        ("generate wordle --out x --tweets x.csv", "others take none"),
        ("generate wordle --out x --make branched --player careful", "omit --player careful"),
        ("generate textworld --out x --level 301", "no --level 301 of coin_collector"),
        ("generate textworld --out x --world w2", "no --world w2 of coin_collector: write --kind"),
        ("train ad --out run --size 2", "3 tasks leave none for a part"),
        ("train ad --out run --history nothing", "There is no learning history in nothing"),
        ("distill --quick --out x --methods rl2", "--methods should be 'ad' or 'ed', got rl2"),
        ("distill --quick --out x --episodes 5", "--episodes should be"),
        ("trian", "There is no command 'trian' after `python -m torchrl_lang`; did you mean train?"),
        ("train ilq", "did you mean ilql?"),
        ("generate wordl", "did you mean wordle?"),
        ("train", "The recipe is missing after `python -m torchrl_lang train`: give bc"),
        ("", "The command is missing"),
    ],
)
def test_the_command_line_says_so_in_a_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words.split())
    assert not list(Path().iterdir())


@pytest.mark.parametrize("more", [["--logger", "trackio"], ["--device", "nowhere"]])
def test_a_run_that_this_machine_refuses_leaves_no_folder(more, home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = tmp_path / "run"
    assert more[0] in refused(capsys, "train", "bc", "--config", home / "data-only.yaml", "--out", run, *more)
    assert not run.exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dataset and a run, both of YAML files."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "data.yaml").write_text(f"out: {folder / 'data'}\nnodes: 10\nmax-turns: 7\ngames: 60\n")
    assert main(["generate", "random_walks", "--config", str(folder / "data.yaml")]) == 0
    options = {"data": str(folder / "data"), "layers": 1, "width": 16, "heads": 2, "batch_size": 8}
    options |= {"steps": 3, "eval_games": 4, "lr": "1e-3", "seed": 5}
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    (folder / "data-only.yaml").write_text(f"data: {folder / 'data'}")
    assert main(["train", "ilql", "--config", str(folder / "run.yaml"), "--out", str(folder / "run")]) == 0
    return folder


def test_a_run_is_repeated_from_its_own_file(home, tmp_path):
    again = ["train", "ilql", "--config", str(home / "run" / "config.yaml")]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert_same_runs(tmp_path / "again", home / "run")
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


def test_a_file_never_imports_a_task(home, tmp_path, monkeypatch, capsys):
    """Also not the file of a run, which may come from somebody else."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trap_in_yaml.py").write_text("raise BaseException('imported')\n")
    (tmp_path / "run.yaml").write_text((home / "run.yaml").read_text() + "task: trap_in_yaml:make_env\n")
    run = ["train", "ilql", "--config", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "run")]
    assert "add --task trap_in_yaml:make_env" in refused(capsys, *run)
    assert main([*run, "--task", "random_walks"]) == 0
