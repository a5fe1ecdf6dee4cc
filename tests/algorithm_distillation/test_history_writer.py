"""Writers of learning histories: what they refuse, and what a failure leaves."""

import errno
import os

import pytest

from tests.algorithm_distillation.conftest import source
from torchrl_lang.algorithm_distillation import HistoryWriter, history_writer, load_history
from torchrl_lang.algorithm_distillation.history import HistoryManifest
from torchrl_lang.recipes.command_line import describe


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


def test_a_part_whose_manifest_failed_is_recorded_again(tmp_path, monkeypatch):
    def fail(manifest, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    made = source()
    steps = made.history()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        writer.extend(steps[..., :20])
        with monkeypatch.context() as patch:
            patch.setattr(HistoryManifest, "write", fail)
            with pytest.raises(OSError, match="No space"):
                writer.extend(steps[..., 20:40])
        assert writer.recorded == 20 == load_history(tmp_path, unfinished=True).recorded
        writer.extend(steps[..., 20:])
    assert (load_history(tmp_path).steps == steps).all()


def test_parts_that_do_not_fit(tmp_path):
    made = source()
    steps = made.history()
    with HistoryWriter(tmp_path, made.tasks, 2, 30) as writer:
        for part in (steps[:, :1], steps, steps[..., :0]):
            with pytest.raises(ValueError, match="A part has batch size"):
                writer.extend(part)
        with pytest.raises(ValueError, match="have another 'episode_step'"):
            writer.extend(steps[..., 1:20])  # not the first steps
        writer.extend(steps[..., :20])
        with pytest.raises(ValueError, match="but those before had"):
            writer.extend(steps[..., 20:30].exclude("action_log_prob"))


def test_steps_are_on_the_disk_before_the_manifest_lists_them(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(history_writer, "flush", lambda path: calls.append(path.stem))
    monkeypatch.setattr(HistoryManifest, "write", lambda manifest, path: calls.append(len(manifest.parts)))
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        for block in made.blocks(30):
            writer.extend(block)
    keys = sorted(made.history().keys())
    assert calls == ["rows", *keys, 1, *keys, 2]
