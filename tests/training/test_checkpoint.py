from __future__ import annotations

import json
import math
import os
import shutil
import warnings

import pytest
import torch
from torchrl.objectives import SoftUpdate

from tests.kills import kills
from tests.objectives.models import make_ilql
from torchrl_lang.training import Checkpointer, RandomState, adamw
from torchrl_lang.training.state import CheckpointError


class Box:
    """A state of one's own."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict) -> None:
        self.value = state_dict["value"]


def test_tied_weights_and_targets_of_a_loss_come_back(tmp_path):
    """Optimizers, schedulers, samplers and random streams are in ``test_resume.py``."""
    loss, other = make_ilql(), make_ilql()
    updater = SoftUpdate(loss, eps=0.5)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(1)
    updater.step()
    Checkpointer(tmp_path).register("loss", loss).save(1)
    Checkpointer(tmp_path).register("loss", other).restore()
    state, found = loss.state_dict(), other.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert len({id(p) for p in other.parameters()}) == len({id(p) for p in loss.parameters()})


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2).register("box", box := Box(0))
    values = [(5, -1.0), (10, -math.inf), (20, -1.0), (30, None), (40, -2.0), (50, math.nan), (60, -2.0)]
    for step, value in values:
        box.value = step
        checkpointer.save(step, None if value is None else {"return": value, "loss": -step, "inf": math.inf})
    assert checkpointer.steps() == [20, 50, 60]
    assert checkpointer.restore("best") == 20  # of equals the latest
    assert box.value == 20
    assert checkpointer.restore() == 60
    assert checkpointer.restore(50) == 50
    assert box.value == 50
    assert checkpointer.metrics("best") == {"return": -1.0, "loss": -20.0}
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(CheckpointError, match="No checkpoint of step 3"):
        checkpointer.restore(3)
    with pytest.raises(ValueError, match="later than 10"):
        checkpointer.save(10)
    for again, value in enumerate((-9.0, -3.0, -2.0), 1):  # a step can be saved again
        box.value = value
        assert checkpointer.save(60, {"return": value}).name == f"step-000000060-{again}"
    assert checkpointer.restore() == 60
    assert box.value == -2.0
    assert len(list(tmp_path.iterdir())) == 3
    none = Checkpointer(tmp_path / "none").register("box", box)
    assert none.restore() is none.restore("best") is None
    assert none.metrics() == {}


def test_a_kill_at_any_step_leaves_whole_checkpoints_and_the_next_run_no_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing that it wrote

    def save():
        Checkpointer(tmp_path, keep=1).register("box", Box(torch.full((4,), 20.0))).save(20)

    def prepare():
        shutil.rmtree(tmp_path)
        Checkpointer(tmp_path).register("box", Box(torch.full((4,), 10.0))).save(10)

    prepare()
    for _ in kills(save):
        again = Checkpointer(tmp_path, keep=1).register("box", box := Box(0))
        step = again.restore()
        assert step in (10, 20)
        assert box.value.tolist() == [step] * 4
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith("step-")]
        again.prune()
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:09d}"]
        prepare()


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "gone", "folder"])
def test_damage_is_found_before_anything_changes(tmp_path, name, how):
    checkpointer = Checkpointer(tmp_path).register("box", box := Box(torch.ones(50)))
    file = checkpointer.save(10, {"return": 1.0}) / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "flip":
        file.write_bytes(data)
    box.value = "untouched"
    for step in (10, "best"):
        if step == 10 or name != "manifest.json":
            with pytest.raises(CheckpointError, match=f"{name}.*: delete"):
                checkpointer.restore(step)
    expected = rf"All checkpoints in .* are damaged: delete them to begin at step 0. The latest: .*{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one error is enough
        with pytest.raises(CheckpointError, match=expected):
            checkpointer.restore()
    assert box.value == "untouched"


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_damaged_latest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, name):
    first = Checkpointer(tmp_path).register("box", box := Box(1))
    for step in (10, 20):
        box.value = step
        first.save(step, {"return": step})
    (tmp_path / "step-000000020" / name).unlink()
    second = Checkpointer(tmp_path).register("box", again := Box(0))
    with pytest.warns(
        UserWarning, match=rf"damaged checkpoint, which the next save deletes.*step-000000020.{name} is missing"
    ):
        assert second.restore() == 10
    assert again.value == 10
    again.value = 15
    second.save(15, {"return": 15})  # the run goes on from there
    assert second.steps() == [10, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000010", "step-000000015"]
    assert Checkpointer(tmp_path).register("box", again).restore("best") == 15
    file = tmp_path / "step-000000010" / "manifest.json"  # an edited figure does not change which is best
    file.write_text(file.read_text().replace("10", "99"))
    with pytest.warns(UserWarning, match="changed"):
        assert Checkpointer(tmp_path).register("box", again).restore("best") == 15


@pytest.mark.parametrize("what", ["module", "optimizer"])
def test_parameters_that_are_not_finite_are_not_saved(tmp_path, what):
    layer = torch.nn.Linear(2, 3)
    layer.register_buffer("least", torch.tensor(-math.inf))  # no parameter: it may be anything
    part, name = (layer, "part/bias") if what == "module" else (adamw(layer, 0.1), "part/")
    checkpointer = Checkpointer(tmp_path).register("part", part)
    checkpointer.save(1)
    with torch.no_grad():
        layer.bias[1] = math.nan
    with pytest.raises(
        ValueError, match=rf"At step 2 .* not finite: \['{name}.*No checkpoint was written, .* \[1\] are kept"
    ):
        checkpointer.save(2)
    assert checkpointer.steps() == [1]


def test_files_are_no_pickle_and_another_format_is_refused(tmp_path):
    path = Checkpointer(tmp_path).register("box", box := Box(7)).save(10)
    names = ["manifest.json", "state.json", "tensors.safetensors"]
    assert set(names) <= {file.name for file in path.iterdir()} <= {*names, "checksums.json"}
    assert b"\x80\x04" not in (path / "state.json").read_bytes()
    path = path.rename(tmp_path / "step-000000020")
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 10: it was renamed"):
        Checkpointer(tmp_path).register("box", box).restore(20)
    path = path.rename(tmp_path / "step-000000010")
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    assert set(manifest["versions"]) == {"torchrl_lang", "torch", "torchrl", "tensordict"}
    file.write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(CheckpointError, match="has version 2, but this release reads version 4"):
        Checkpointer(tmp_path).register("box", box).restore(10)


def test_parts_that_a_checkpoint_lacks_has_beside_or_does_not_fit(tmp_path):
    Checkpointer(tmp_path).register("one", Box(1)).register("layer", torch.nn.Linear(2, 3)).save(1)
    one, two = Box(0), Box(2)
    with pytest.raises(CheckpointError, match=r"no state for \['two'\]"):
        Checkpointer(tmp_path).register("one", one).register("two", two).restore()
    assert one.value == 0
    with pytest.raises(CheckpointError, match=r"'layer'.*does not fit"):
        Checkpointer(tmp_path).register("layer", torch.nn.Linear(2, 4)).restore()
    with pytest.raises(KeyError, match="expected"):
        RandomState(b=torch.Generator()).load_state_dict(RandomState(a=torch.Generator()).state_dict())
    with pytest.raises(ValueError, match="registered already"):
        Checkpointer("nowhere").register("one", one).register("one", two)
    with pytest.raises(ValueError, match="keep"):
        Checkpointer("nowhere", keep=0)
