"""Writers of learning histories: what they refuse, and what a failure leaves."""

import errno
import hashlib
import os
import re
import weakref

import pytest
import torch

from tests.algorithm_distillation.conftest import source
from torchrl_lang.algorithm_distillation import HistoryWriter, LearningHistory, history_writer, load_history
from torchrl_lang.algorithm_distillation.history_format import part_digests
from torchrl_lang.recipes.errors import describe


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (("a", "b"), (1,), "'a' of a step is a TensorDict, expected a tensor: give its entries names of their own"),
        ("empty", (2, 0), r"'empty' of a step has shape \[2, 0\], expected sizes of at least 1: leave it out"),
    ],
)
def test_entries_that_cannot_be_stored(tmp_path, key, shape, message):
    made = source()
    steps = made.history().set(key, torch.ones(3, 2, 60, *shape))
    with pytest.raises(ValueError, match=message):
        LearningHistory(steps, made.tasks)
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer, pytest.raises(ValueError, match=message):
        writer.extend(steps)
    assert not list(tmp_path.iterdir())


LOG_PROB = "'action_log_prob' of a step is torch.{} of shape {}, expected torch.float32 of shape []"


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("action_log_prob", lambda value: value[..., None], LOG_PROB.format("float32", "[1]")),
        ("action_log_prob", lambda value: value.long(), LOG_PROB.format("int64", "[]")),
        ("action_log_prob", lambda value: value * torch.nan, "360 steps have a non-finite 'action_log_prob' (task 0, st"
         "ream 0, step 0 is the first): leave out the entry if it is not known"),
        ("action_log_prob", lambda value: value - torch.inf, "have a non-finite 'action_log_prob'"),
        ("observation", lambda value: value / value.lt(3).logical_not(), "have a non-finite 'observation'"),
        ("action", lambda value: value * torch.inf, "have a non-finite 'action'"),
    ],
)  # fmt: skip
def test_log_probabilities_and_numbers_that_no_model_could_learn(tmp_path, key, change, message):
    made = source()
    steps = made.history()
    steps = steps.set(key, change(steps[key]))
    with pytest.raises(ValueError, match=re.escape(message)):
        LearningHistory(steps, made.tasks)
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer, pytest.raises(ValueError, match=re.escape(message)):
        writer.extend(steps)


def test_log_probabilities_may_be_left_out():
    made = source()
    assert "action_log_prob" not in LearningHistory(made.history().exclude("action_log_prob"), made.tasks).steps


def test_one_copy_is_held_while_parts_are_hashed(monkeypatch):
    steps, arrays, held = source().history().transpose(0, 2), [], []  # its entries are not contiguous
    numpy, sha256 = torch.Tensor.numpy, hashlib.sha256

    def converted(tensor):
        array = numpy(tensor)
        arrays.append(weakref.ref(array))
        return array

    def hashed(data):
        held.append(sum(array() is not None for array in arrays))
        return sha256(data)

    monkeypatch.setattr(torch.Tensor, "numpy", converted)
    monkeypatch.setattr(hashlib, "sha256", hashed)
    found = part_digests(steps)
    assert held == [1] * len(found) == [1] * 8
    assert found["action"] == sha256(numpy(steps["action"]).tobytes()).hexdigest()


def test_the_space_of_the_planned_steps_is_taken_at_the_first_part(tmp_path):
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 10_000) as writer:
        writer.extend(made.history())
    files = [path.stat() for path in (tmp_path / "rows").iterdir()]
    assert all(file.st_blocks * 512 >= file.st_size for file in files)  # none is sparse


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full, raising=False)
            with pytest.raises(OSError, match="No space") as caught:
                writer.extend(made.history())
        line = describe(caught.value)
        assert line.startswith(
            f"{tmp_path / 'rows' / 'action.memmap'}: No space left on device; make room on that disk"
        )
        writer.extend(made.history())
    assert (load_history(tmp_path).steps == made.history()).all()


def test_more_steps_than_a_file_can_hold(tmp_path):
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 2**62) as writer, pytest.raises(OSError, match="File too large"):
        writer.extend(made.history())


def test_a_part_whose_manifest_failed_is_recorded_again(tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    made = source()
    steps = made.history()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        writer.extend(steps[..., :20])
        with monkeypatch.context() as patch:
            patch.setattr(history_writer, "write_manifest", fail)
            with pytest.raises(OSError, match="No space"):
                writer.extend(steps[..., 20:40])
        assert writer.recorded == 20 == load_history(tmp_path, unfinished=True).recorded
        writer.extend(steps[..., 20:])
    assert (load_history(tmp_path).steps == steps).all()


def test_a_writer_is_used_inside_its_with_block(tmp_path):
    made = source()
    writer = HistoryWriter(tmp_path, made.tasks, 2, 60)
    with pytest.raises(RuntimeError, match="use it in a with statement"):
        writer.extend(made.history())
    with writer:
        writer.extend(made.history()[..., :20])
    with pytest.raises(RuntimeError, match="use it in a with statement"):
        writer.extend(made.history()[..., 20:])
    assert load_history(tmp_path, unfinished=True).recorded == 20
