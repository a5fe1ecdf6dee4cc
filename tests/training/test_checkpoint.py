from __future__ import annotations

import json
import math
import os
import shutil
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.objectives import LossModule, SoftUpdate

from tests.kills import kills
from torchrl_lang.training import Checkpointer, CheckpointError, RandomState, adamw, warmup_cosine


class Box:
    """A state of one's own."""

    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict) -> None:
        self.value = state_dict["value"]


def test_optimizer_scheduler_sampler_and_streams_come_back(tmp_path):
    def parts(seed: int) -> dict:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False))
        model[1].weight = model[0].weight
        optimizer = adamw(model, 0.1)
        generator = torch.Generator().manual_seed(seed)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=4, generator=generator
        )
        buffer.extend(TensorDict(x=torch.arange(10) % 7, batch_size=[10]))
        scheduler = warmup_cosine(optimizer, 10, warmup=3)
        random = RandomState(sampler=generator)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "sampler": buffer.sampler,
            "random": random,
            "buffer": buffer,
        }

    def train(p: dict, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = p["model"](p["buffer"].sample()["x"]).square().mean() + torch.rand(()) * p["model"][0].weight.mean()
            p["optimizer"].zero_grad()
            loss.backward()
            p["optimizer"].step()
            p["scheduler"].step()
            losses.append(float(loss.detach()))
        return losses

    def checkpointer(p: dict) -> Checkpointer:
        out = Checkpointer(tmp_path)
        for name in ("model", "optimizer", "scheduler", "sampler", "random"):
            out.register(name, p[name])
        return out

    first = parts(0)
    train(first, 4)
    checkpointer(first).save(4)
    expected = train(first, 5)
    second = parts(1)
    train(second, 2)
    assert checkpointer(second).restore() == 4
    assert train(second, 5) == expected
    assert second["model"][0].weight is second["model"][1].weight
    assert torch.equal(second["model"][0].weight, first["model"][0].weight)
    assert second["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()


class Quadratic(LossModule):
    value_network: TensorDictModule
    value_network_params: object
    target_value_network_params: object

    def __init__(self) -> None:
        super().__init__()
        network = TensorDictModule(torch.nn.Linear(2, 1), ["x"], ["v"])
        self.convert_to_functional(network, "value_network", create_target_params=True)


def test_targets_of_a_loss_module_come_back(tmp_path):
    loss, other = Quadratic(), Quadratic()
    updater = SoftUpdate(loss, eps=0.5)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(1)
    updater.step()
    Checkpointer(tmp_path).register("loss", loss).save(1)
    Checkpointer(tmp_path).register("loss", other).restore()
    for key, value in loss.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    targets = [value for key, value in loss.state_dict().items() if key.startswith("target")]
    assert targets
    assert not torch.equal(targets[0], loss.state_dict()["value_network_params.module.weight"])


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2).register("box", box := Box(0))
    values = [(5, -1.0), (10, -3.0), (20, -1.0), (30, None), (40, -2.0), (50, float("nan")), (60, -2.0)]
    for step, value in values:
        box.value = step
        checkpointer.save(step, None if value is None else {"return": value, "loss": -step})
    assert checkpointer.steps() == [20, 50, 60]
    assert checkpointer.restore("best") == 20  # of equals the latest
    assert box.value == 20
    assert checkpointer.restore() == 60
    assert checkpointer.restore(50) == 50
    assert box.value == 50
    assert checkpointer.metrics("best") == {"return": -1.0, "loss": -20.0}
    assert len(list(tmp_path.iterdir())) == 3


def test_nothing_there_yet(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none").register("box", Box(0))
    assert checkpointer.restore() is None
    assert checkpointer.restore("best") is None
    assert checkpointer.metrics() == {}
    with pytest.raises(CheckpointError, match="No checkpoint of step 3"):
        checkpointer.restore(3)


def test_a_step_can_be_saved_again(tmp_path):
    checkpointer = Checkpointer(tmp_path).register("box", box := Box(1))
    checkpointer.save(10, {"return": 5.0})
    for value in (2, 3):
        box.value = value
        checkpointer.save(10, {"return": float(value)})
    box.value = 0
    assert checkpointer.restore("best") == 10
    assert box.value == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_going_back_in_time_is_an_error(tmp_path):
    checkpointer = Checkpointer(tmp_path).register("box", Box(1))
    checkpointer.save(20)
    with pytest.raises(ValueError, match="later than 10"):
        checkpointer.save(10)


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
        assert again.steps() == [step]
        again.save(30)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000030"]
        prepare()


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone", "empty", "folder"])
def test_damage_is_found_before_anything_changes(tmp_path, name, how):
    checkpointer = Checkpointer(tmp_path).register("box", box := Box(torch.ones(50)))
    file = checkpointer.save(10, {"return": 1.0}) / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how != "gone":
        file.write_bytes({"flip": data, "cut": data[:-5], "empty": b""}[how])
    box.value = "untouched"
    for step in (10, "best"):
        if step == 10 or name != "manifest.json":
            with pytest.raises(
                CheckpointError, match=rf"{name} .*: delete {tmp_path}/step-000000010 to continue without it"
            ):
                checkpointer.restore(step)
    expected = rf"All checkpoints in .* are damaged: delete them to begin at step 0. The latest: .*{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one error is enough
        with pytest.raises(CheckpointError, match=expected):
            checkpointer.restore()
    assert box.value == "untouched"


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
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


def test_a_figure_that_was_edited_does_not_change_which_is_best(tmp_path):
    checkpointer = Checkpointer(tmp_path).register("box", box := Box(1))
    for step in (10, 20):
        box.value = step
        checkpointer.save(step, {"return": -step})
    file = tmp_path / "step-000000020" / "manifest.json"
    file.write_text(file.read_text().replace("-20", "20"))
    with pytest.warns(UserWarning, match="was changed after it was written"):
        assert checkpointer.restore("best") == 10


def test_a_renamed_checkpoint_is_not_that_of_another_step(tmp_path):
    checkpointer = Checkpointer(tmp_path).register("box", Box(1))
    checkpointer.save(10).rename(tmp_path / "step-000000020")
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 10: it was renamed"):
        checkpointer.restore(20)


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


def test_figures_of_any_value_come_back(tmp_path):
    checkpointer = Checkpointer(tmp_path).register("box", box := Box([math.inf, -math.inf, 0.1]))
    checkpointer.save(1, {"return": math.inf, "loss": math.nan, "zero": 0})
    assert str(checkpointer.metrics()) == "{'return': inf, 'loss': nan, 'zero': 0.0}"
    box.value = None
    assert checkpointer.restore("best") == 1
    assert box.value == [math.inf, -math.inf, 0.1]


def test_another_format_is_refused_by_its_version(tmp_path):
    path = Checkpointer(tmp_path).register("box", box := Box(7)).save(10)
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(CheckpointError, match="has version 2, but this release reads version 3"):
        Checkpointer(tmp_path).register("box", box).restore(10)


def test_what_is_not_in_the_checkpoint_is_named(tmp_path):
    Checkpointer(tmp_path).register("one", Box(1)).save(1)
    more = Checkpointer(tmp_path).register("one", box := Box(0)).register("two", Box(2))
    with pytest.raises(CheckpointError, match=r"no state for \['two'\]"):
        more.restore()
    assert box.value == 0


def test_a_state_that_does_not_fit_is_named(tmp_path):
    Checkpointer(tmp_path).register("layer", torch.nn.Linear(2, 3)).save(1)
    with pytest.raises(CheckpointError, match=r"'layer'.*does not fit"):
        Checkpointer(tmp_path).register("layer", torch.nn.Linear(2, 4)).restore()


def test_part_of_a_checkpoint(tmp_path):
    Checkpointer(tmp_path).register("one", Box(1)).register("two", Box(2)).save(1)
    Checkpointer(tmp_path).register("two", box := Box(0)).restore()
    assert box.value == 2


def test_registration():
    checkpointer = Checkpointer("nowhere").register("one", Box(1))
    with pytest.raises(ValueError, match="registered already"):
        checkpointer.register("one", Box(1))
    with pytest.raises(TypeError, match="without state_dict"):
        checkpointer.register("two", 3)
    with pytest.raises(ValueError, match="keep"):
        Checkpointer("nowhere", keep=0)


def test_files_hold_no_pickle(tmp_path):
    path = Checkpointer(tmp_path).register("layer", torch.nn.Linear(2, 3)).save(1)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json", "tensors.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1
    assert set(manifest["versions"]) == {"torchrl_lang", "torch", "torchrl", "tensordict"}
    assert b"\x80\x04" not in (path / "state.json").read_bytes()


def test_random_state_knows_its_generators():
    state = RandomState(a=torch.Generator()).state_dict()
    with pytest.raises(KeyError, match="expected"):
        RandomState(b=torch.Generator()).load_state_dict(state)


def test_an_optional_object_that_a_checkpoint_lacks_stays_as_it_is(tmp_path):
    old, new = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    Checkpointer(tmp_path).register("old", old).save(3)
    before = new.weight.clone()
    checkpointer = Checkpointer(tmp_path).register("old", old).register("new", new, optional=True)
    assert checkpointer.restore() == 3
    assert torch.equal(new.weight, before)
    checkpointer.save(4)
    torch.nn.init.zeros_(new.weight)
    assert checkpointer.restore() == 4
    assert torch.equal(new.weight, before)
