"""A folder is written whole or not at all, wherever the writer is killed; one process at a time."""

import errno
import shutil
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from tests.kills import kills
from tests.processes import Program
from torchrl_lang._files import folder_lock, is_unfinished, remove_leftovers, write_file, write_folder


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_folder(tmp_path, replaces):
    target = tmp_path / "model"

    def write(text):
        with write_folder(target) as folder:
            for name in "ab":
                (folder / name).write_text(text)

    def prepare():
        shutil.rmtree(target, ignore_errors=True)
        if replaces:
            write("old")

    prepare()
    for _ in kills(lambda: write("new")):
        if target.exists():
            assert {path.read_text() for path in target.iterdir()} in ({"old"}, {"new"})
        write("last")  # the next writer
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert {path.read_text() for path in target.iterdir()} == {"last"}
        prepare()
    assert {path.read_text() for path in target.iterdir()} == {"new"}


def test_a_replacement_that_was_killed_is_undone(tmp_path):
    target = tmp_path / "model"
    with write_folder(target) as folder:
        (folder / "a").write_text("old")
    target.rename(tmp_path / ".model.writing-old")  # killed between the two renames
    assert is_unfinished(target)
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "a").read_text() == "old"


def test_a_folder_that_is_being_written_is_no_leftover(tmp_path):
    with write_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
        with (
            pytest.raises(FileExistsError, match=f"Another process writes in {tmp_path}/model: wait"),
            write_folder(tmp_path / "model"),
        ):
            pass
        remove_leftovers(tmp_path)
    assert (tmp_path / "model" / "a").read_text() == "new"


def test_what_a_link_points_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to("disk")
    with write_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "disk" / "a").read_text() == "new"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "run" / "config.json"
    write_file(path, "old")
    write_file(path, "half a pair: \ud800")
    assert path.read_text() == r"half a pair: \ud800"
    with pytest.raises(TypeError):
        write_file(path, 3)
    assert [item.name for item in path.parent.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_the_lock_falls_with_its_process(tmp_path):
    code = (
        "import sys, time; from torchrl_lang._files import folder_lock\n"
        "with folder_lock(sys.argv[1], 'trains'): print('held', flush=True); time.sleep(60)"
    )
    holder = Program("-c", code, tmp_path / "run")
    holder.wait_for("held")
    with (
        pytest.raises(FileExistsError, match=r"Another process trains in .*: wait"),
        folder_lock(tmp_path / "run", "trains"),
    ):
        pass
    holder.kill()
    with folder_lock(tmp_path / "run", "trains"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_folder_that_was_replaced_while_it_was_opened_is_not_locked(tmp_path, monkeypatch):
    """The lock would be that of the folder which another process has moved away."""
    run = tmp_path / "run"

    def flock(descriptor, operation):
        run.rename(tmp_path / "old")
        run.mkdir()

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(FileExistsError, match="Another process trains"), folder_lock(run, "trains"):
        pass


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    flock = Mock(side_effect=OSError(errno.ENOTSUP, "not supported"))
    monkeypatch.setattr("fcntl.flock", flock)
    with folder_lock(tmp_path), folder_lock(tmp_path):
        assert flock.call_count == 2


@contextmanager
def full_disk():
    """No file may grow beyond 1,000 bytes: as a full disk, writing fails in the midst.

    Not a fixture: pytest writes its report before a fixture ends, and that may go to a file.
    """
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_errors_of_the_system_name_the_target_and_leave_nothing(tmp_path):
    def text(path):
        path.write_text("x" * 10_000)

    def tensors(path):
        save_file({"weight": torch.zeros(10_000)}, path)

    for write in (text, tensors):
        too_large = pytest.raises(OSError, match="File too large")
        with too_large as caught, full_disk(), write_folder(tmp_path / "model") as folder:
            write(folder / "file")
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "model"))
    with pytest.raises(OSError, match=r"File too large: '.*config.json'"), full_disk():
        write_file(tmp_path / "config.json", "x" * 10_000)
    assert not list(tmp_path.iterdir())
