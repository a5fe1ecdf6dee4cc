"""The folder of a run: one process trains in it, it is finished whole or not at all, its files are read with checks."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.processes import Program, wait_until
from tests.recipes.commands import checkpoints, refused
from torchrl_lang.__main__ import main
from torchrl_lang._files import json_digest
from torchrl_lang.objectives import BCLoss

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "4"]
SHORT = [*SMALL, "--steps", "4", "--eval-every", "2", "--log-every", "1"]


@pytest.fixture(scope="module")
def home(wordle, tmp_path_factory):
    """A folder with the data set ``data`` and a finished run ``run``."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(wordle / "data", folder / "data")
    assert main(train(folder, folder / "run")) == 0
    return folder


@pytest.fixture
def run(home, tmp_path):
    return shutil.copytree(home / "run", tmp_path / "run")


def train(home, out, *more):
    return ["train", "bc", "--data", str(home / "data"), "--out", str(out), *SHORT, *more]


def evaluate(run):
    return ["evaluate", "--run", str(run), "--games", "4", "--no-plots"]


def test_two_processes_do_not_train_in_one_folder_and_sigterm_stops_the_first(home, tmp_path, capsys):
    """With another seed the second would end with a model that the first had trained."""
    call = train(home, tmp_path / "run", "--steps", "100000", "--eval-every", "2", "--log-every", "50000")
    first = Program("-m", "torchrl_lang", *call)
    try:
        wait_until(lambda: checkpoints(tmp_path / "run") or first.returncode is not None)
        error = refused(capsys, *call, "--seed", "1")
        assert f"Another process trains in {tmp_path / 'run'}" in error
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    finally:
        first.kill()
    assert first.returncode == 143
    assert first.stdout == ""
    assert first.stderr.splitlines()[-1].startswith("torchrl_lang: stopped after step ")
    assert "Traceback" not in first.stderr
    assert not list(tmp_path.rglob("*.writing*"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs /proc")
def test_a_signal_while_torch_is_being_imported(tmp_path):
    call = [sys.executable, "-m", "torchrl_lang", "train", "bc", "--data", "x", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), seconds=60)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    again = "the same command continues from its last checkpoint, or from the beginning"
    assert errors == f"torchrl_lang: stopped; {again}\n"


def test_a_model_is_there_whole_or_not_at_all(home, tmp_path, monkeypatch, capsys):
    """Interrupted while the model was being written: the run has not finished, says how to continue, and continues."""
    run = tmp_path / "run"

    def half(lm, folder, **kwargs):
        (Path(folder) / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", half)
        assert main(train(home, run)) == 130
    assert not (run / "model").exists()
    assert f"The run in {run} has not finished: continue it with" in refused(capsys, *evaluate(run))
    left = run / ".model.writing-0"  # of a process that was killed
    left.mkdir()
    assert main(train(home, run)) == 0
    assert main(evaluate(run)) == 0
    assert not list(run.rglob("*.writing*"))


def test_training_that_comes_to_nan_stops_and_keeps_its_checkpoint(home, tmp_path, monkeypatch, capsys):
    run, forward, calls = tmp_path / "run", BCLoss.forward, []

    def spoilt(loss, *args, **kwargs):
        losses = forward(loss, *args, **kwargs)
        calls.append(1)
        return losses.set("loss_actor", losses["loss_actor"] * torch.nan) if len(calls) == 3 else losses

    monkeypatch.setattr(BCLoss, "forward", spoilt)
    capsys.readouterr()
    assert main(train(home, run)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("torchrl_lang: loss_actor is nan at step 3: training was stopped")
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000000002"]
    assert not (run / "model").exists()


def test_weights_that_came_to_infinity_are_not_saved(home, tmp_path, capsys):
    """A weight decay of 1e38 makes them so in a step whose loss and gradient were finite."""
    assert main(train(home, tmp_path / "run", "--weight-decay", "3e38", "--lr", "1", "--optimizer", "adamw")) == 2
    assert "training was stopped" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def notes(**changes):
    return lambda record: {**record, "notes": {**record["notes"], **changes}}


def without(name):
    return lambda record: {**record, "notes": {key: value for key, value in record["notes"].items() if key != name}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: [], "holds [], not a JSON object"),
        (lambda record: {**record, "version": 1}, "has version 1, but this release reads version 2"),
        (lambda record: {**record, "notes": "wordle"}, "has 'wordle' as \"notes\", expected "),
        (without("task"), "is about the task None, the recipes have wordle"),
        (without("words"), 'has no field "words"'),
        (notes(words=["crane", "crane"]), "holds no task ('crane'"),
        (notes(words=["x" * 1_000_000]), "not five lower-case letters"),
        (notes(rules="none"), "has 'none' as \"rules\", expected 'official'"),
    ],
)
def test_a_damaged_record(run, change, message, capsys):
    path = run / "config.json"
    record = json.loads(path.read_text())
    del record["digest"]
    changed = change(record)
    path.write_text(json.dumps(changed | {"digest": json_digest(changed)} if isinstance(changed, dict) else changed))
    error = refused(capsys, *evaluate(run))
    assert message in error
    assert str(path) in error
    assert len(error) < 1000


def test_a_record_of_other_values_than_were_written_or_none_and_a_damaged_log(home, run, capsys):
    """They may be as valid as those: here two words change places."""
    path = run / "config.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record))  # another layout
    assert main(evaluate(run)) == 0
    record["notes"]["words"][:2] = record["notes"]["words"][1::-1]
    path.write_text(json.dumps(record))
    assert f"{path} was changed after it was written" in refused(capsys, *evaluate(run))
    path.write_bytes(b'{"notes": ')
    assert f"{path} is not" in refused(capsys, *evaluate(run))
    (run / "log.csv").write_bytes(b"step,loss\n1,x\n")
    (run / "config.json").write_text(json.dumps(json.loads((home / "run" / "config.json").read_text())))
    assert f"{run / 'log.csv'} is not a CSV file of numbers (line 2" in refused(capsys, *train(home, run))


def test_folders_that_are_not_for_runs(home, tmp_path, capsys):
    data, file = home / "data", home / "run" / "config.json"
    assert f"{data} lies in the dataset {data}" in refused(capsys, *train(home, data))
    assert f"lies in the dataset {data}" in refused(capsys, *train(home, data / "rows" / "run"))
    assert f"{file}: File exists" in refused(capsys, *train(home, file))
    assert "Not a directory" in refused(capsys, *train(home, file / "run"))
    generate = ["generate", "wordle", "--games", "4", "--out"]
    assert f"lies in the dataset {data}" in refused(capsys, *generate, data / "more")
    assert f"{file}" in refused(capsys, *generate, file)
    assert sorted(path.name for path in home.iterdir()) == ["data", "run"]
