from __future__ import annotations

import math
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torchrl.record.loggers import get_logger

from torchrl_lang._files import FileError
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.training import RunLog
from torchrl_lang.training.logging import make_log
from torchrl_lang.training.metrics import to_scalars


def test_rows_and_growing_columns(tmp_path):
    log = RunLog(tmp_path / "new" / "log.csv")
    log.log(1, {"loss": torch.tensor(0.5)})
    log.log(2, {"loss": 0.25, "count": torch.tensor(3)})
    log.log(3, {"return": -1.5})
    log.log(3, {"loss": 0.125})
    assert log.path.read_text().splitlines() == ["step,loss,count,return", "1,0.5,,", "2,0.25,3,", "3,0.125,,-1.5"]
    whole = log.path.read_text()
    log.path.write_text(whole + "4")  # a line that is being written
    columns = read_columns(log.path)
    log.path.write_text(whole)
    assert columns["step"] == [1, 2, 3]
    assert math.isnan(columns["return"][0])
    assert columns["return"][2] == -1.5
    values = torch.randn(20, dtype=torch.float64).tolist() + [float("inf"), 1e-300, 2**53 + 1]
    for step, value in enumerate(values, 4):
        log.log(step, {"value": value})
    assert read_columns(log.path)["value"][3:] == [float(value) for value in values]  # exactly
    with pytest.raises(ValueError, match=r"rewind\(5\)"):
        log.log(5, {"loss": 1.0})
    with pytest.raises(ValueError, match="step"):
        log.log(50, {"step": 1.0})


@pytest.mark.parametrize("torn", ["300,0.", '"300,0.5'])
def test_a_torn_row_is_dropped_and_the_rest_continued(tmp_path, torn):
    log = RunLog(tmp_path / "log.csv")
    log.log(1, {"loss": 0.5})
    log.log(200, {"loss": 0.25})
    with open(log.path, "a") as file:
        file.write(torn)
    with pytest.warns(UserWarning, match=r"Dropped the last line of .*log.csv, which is incomplete after a crash"):
        again = RunLog(log.path)
    assert again.last_step == 200
    again.log(300, {"loss": 0.125})
    assert again.path.read_text().splitlines() == ["step,loss", "1,0.5", "200,0.25", "300,0.125"]
    log.path.write_bytes(b"")
    assert RunLog(log.path).last_step is None
    log.path.write_bytes(b"step,lo")
    with pytest.warns(UserWarning, match="incomplete after a crash"):
        begun = RunLog(log.path)
    begun.log(1, {"loss": 0.5})
    assert begun.path.read_text().splitlines() == ["step,loss", "1,0.5"]


def test_a_resumed_run_rewinds_and_trackers_are_told_the_same(tmp_path):
    tracker = get_logger("csv", str(tmp_path / "theirs"), "run")
    first = RunLog(tmp_path / "log.csv", [tracker])
    for step in (1, 2, 3):
        assert first.log(step, {"loss": torch.tensor(step / 4)}) == {"loss": step / 4}
    log = RunLog(tmp_path / "log.csv", [tracker])  # killed; the checkpoint was at step 1
    log.rewind(1)
    assert log.last_step == 1
    for step in (2, 3, 4):
        log.log(step, {"loss": step / 4})
    log.close()
    expected = ["1,0.25", "2,0.5", "3,0.75", "4,1.0"]
    assert log.path.read_text().splitlines() == ["step,loss", *expected]
    assert set((tmp_path / "theirs" / "run" / "scalars" / "loss.csv").read_text().splitlines()) == set(expected)
    log.rewind(None)
    assert log.path.read_text().splitlines() == ["step"]
    assert log.last_step is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"step,loss\n1,0.5\n2,\xff\n", "is not UTF-8 text"),
        (b"step,loss\n1,0.5\n2,x\n", r"is not a CSV file of numbers \(line 3"),
        (b"step,loss\n1,0.5\n2\n", "line 3"),
        (b"step,loss\n,0.5\n", "on line 2"),
        (b"step,\n1,0.5\n", r"a column of \['step', ''\] has no name"),
        (b"step,lo\x1bss\n1,0.5\n", "has no name or is repeated"),
        (b"step,loss,loss\n1,0.5,0.5\n", "has no name or is repeated"),
        (b"step,loss\n2,0.5\n1,0.5\n", "has the step 1 after the step 2 on line 3"),
        (b"step,loss\n1.5,0.5\n", "has the step 1.5"),
        (b"thesis, chapter one", "is not a log: it begins with 'thesis, chapter one'"),
        (b"a,b\n1,2\n", "it begins with 'a,b"),
    ],
)
def test_a_damaged_log_is_an_error_in_one_line_and_left_as_it_is(tmp_path, content, found):
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(FileError, match=found) as caught:
        RunLog(path)
    assert str(caught.value).endswith("correct it, or move it away to begin a new log.")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert path.read_bytes() == content


def test_scalars():
    td = TensorDict(loss=torch.tensor(0.5, requires_grad=True), inner=TensorDict(n=torch.tensor([2])))
    assert to_scalars(td) == {"loss": 0.5, "inner/n": 2}
    mixed = to_scalars({"half": torch.tensor(0.5, dtype=torch.bfloat16), "yes": torch.tensor(True), "n": 2})
    assert mixed == {"half": 0.5, "yes": 1.0, "n": 2}
    with pytest.raises(ValueError, match=r"\(2,\)"):
        to_scalars({"loss": torch.zeros(2)})


def test_trackers_that_cannot_be_used(tmp_path, monkeypatch):
    make_log(tmp_path / "csv", trackers=["csv"]).log(1, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"one of .*csv.*tensorboard"):
        make_log(tmp_path, trackers=["pigeon"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install wandb"):
        make_log(tmp_path, trackers=["csv", "wandb"])


def test_a_name_of_a_run_is_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_lang.training.logging.importlib.util.find_spec", Mock())
    monkeypatch.setattr("torchrl_lang.training.logging.get_logger", opened := Mock())
    for _ in range(2):
        make_log(tmp_path, trackers=["tensorboard"])
    first, second = (call.args for call in opened.call_args_list)
    name = (tmp_path / "run_name.txt").read_text().strip()
    assert first == second == ("tensorboard", str(tmp_path / "tensorboard"), name)
    for name in ("../../elsewhere", "", "two\nlines", ".hidden"):  # it cannot lead elsewhere
        (tmp_path / "run_name.txt").write_text(name)
        with pytest.raises(FileError, match=r"run_name\.txt holds"):
            make_log(tmp_path, trackers=["tensorboard"])


def test_a_resumed_run_keeps_its_name_with_trackers(tmp_path):
    pytest.importorskip("tensorboard")
    for step in (1, 2):
        log = make_log(tmp_path, trackers=["tensorboard"])
        log.log(step, {"loss": 0.5})
        log.close()
    (run,) = (tmp_path / "tensorboard").iterdir()
    assert run.name == (tmp_path / "run_name.txt").read_text().strip()
    assert len(list(run.iterdir())) == 2
