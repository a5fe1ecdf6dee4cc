"""A folder is written whole or not at all, wherever the writer is killed; one process at a time."""

import os
import signal
import subprocess
import sys

import pytest

from torchrl_lang.storage import folder_lock, remove_folder, remove_leftovers, write_file, write_folder

WRITER = """
import os, signal, sys
from pathlib import Path
import torchrl_lang.storage.folders as folders
count, last = 0, int(sys.argv[2])
def counted(name, function):
    def call(*arguments, **options):
        global count
        count += 1
        if count > last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
for name in ("rename", "mkdir"):
    setattr(Path, name, counted(name, getattr(Path, name)))
folders.flush = counted("flush", folders.flush)
folders.shutil.rmtree = counted("rmtree", folders.shutil.rmtree)
with folders.write_folder(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("new")
    (folder / "b").write_text("new")
"""


def killed_after(target, steps):
    """Run the writer, killed at its step after so many. Returns whether it came to its end."""
    done = subprocess.run([sys.executable, "-c", WRITER, str(target), str(steps)], check=False, timeout=60)
    assert done.returncode in (0, -signal.SIGKILL)
    return done.returncode == 0


@pytest.mark.parametrize("replaces", [False, True])
def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_folder(tmp_path, replaces):
    for steps in range(30):
        home = tmp_path / str(steps)
        home.mkdir()
        target = home / "model"
        if replaces:
            target.mkdir()
            (target / "a").write_text("old")
            (target / "b").write_text("old")
        ended = killed_after(target, steps)
        if target.exists():
            assert {path.read_text() for path in target.iterdir()} in ({"old"}, {"new"})
        with write_folder(target) as folder:  # the next writer
            (folder / "a").write_text("last")
        assert [path.name for path in home.iterdir()] == ["model"]
        assert [path.name for path in target.iterdir()] == ["a"]
        if ended:
            return
    pytest.fail("the writer never came to its end")


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    with write_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError, match="No such file"), write_folder(tmp_path / "model") as folder:
        (folder / "nowhere" / "a").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "a").read_text() == "old"


def test_unfinished_copies_and_deletions_are_removed(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / ".kept.writing-1").mkdir()
    (tmp_path / ".config.json.writing-file").write_text("{")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    remove_folder(tmp_path / "kept")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "config.json"
    write_file(path, "old")
    write_file(path, "half a pair: \ud800")
    assert path.read_text() == r"half a pair: \ud800"
    with pytest.raises(TypeError):
        write_file(path, 3)
    assert [item.name for item in path.parent.iterdir()] == ["config.json"]


def test_the_lock_falls_with_its_process(tmp_path):
    code = (
        "import sys, time; from torchrl_lang.storage import folder_lock\n"
        "with folder_lock(sys.argv[1], 'trains'): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(FileExistsError, match=r"Another process trains in .*: wait"),
        folder_lock(tmp_path / "run", "trains"),
    ):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with folder_lock(tmp_path / "run", "trains"):
        pass
    assert not list((tmp_path / "run").iterdir())
