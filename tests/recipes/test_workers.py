"""Workers and signals, with real processes: whoever is ended how, nothing stays behind and nothing is printed."""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import Program, is_running, run, semaphores, wait_until

if not Path("/proc/self/task").exists():
    pytest.skip("processes are looked up in /proc", allow_module_level=True)

PLAYING = """
import signal, sys, torch
from tests.recipes.games import Corridor, NoGame, Walker

def stop(number, frame):
    raise KeyboardInterrupt

if __name__ == "__main__":
    from torchrl_lang.recipes.collect import Games  # workers that import this file do not need it

    signal.signal(signal.SIGTERM, stop)
    kind, workers = sys.argv[1], int(sys.argv[2])
    options = {"workers": workers, "games": 4, "turns": 4, "seed": 0, "device": torch.device("cpu")}
    games = Games(Corridor(), Walker(0.0), kind=kind, **options)
    print("begun", flush=True)
    try:
        while True:
            games.play()
            games.weights_changed()
            print("played", flush=True)
    except KeyboardInterrupt:
        games.check_workers()
        sys.exit(130)
    finally:
        games.close()
"""


@pytest.fixture
def play(tmp_path):
    """Starts the program in a group of its own; what is left of it is killed when the test is over."""
    (tmp_path / "playing.py").write_text(PLAYING)
    begun = []

    def start(kind, **options):
        begun.append(Program(tmp_path / "playing.py", kind, 2, **options))
        return begun[-1]

    yield start
    for process in begun:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def children(pid):
    """Processes that this one started, and those that they did."""
    found = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return found + [grandchild for child in found for grandchild in children(child)]


def workers_of(pid):
    """Its children that do its work; others are servers of Python's multiprocessing."""
    lines = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, *children(pid))}
    return [each for each, line in lines.items() if each != pid and (line == lines[pid] or b"spawn_main" in line)]


def shared_names(program, workers):
    """Names in shared memory that these processes have mapped or listed there."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in (program, *workers))
    named = Path("/dev/shm").glob(f"sem.{semaphores(program).strip('/')}*")
    return {*re.findall(r"/dev/shm/([^\s]+)", maps), *(path.name for path in named)}


def listed(names):
    return [name for name in names if Path("/dev/shm", name).exists()]


def assert_nothing_left(pids, names):
    wait_until(lambda: not list(filter(is_running, pids)), seconds=30)
    assert not listed(names)


@pytest.mark.parametrize(
    ("kind", "number", "whole_group", "code"),
    [
        ("sync", signal.SIGINT, True, 130),
        ("async", signal.SIGTERM, True, 130),
        ("sync", signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["ctrl-c", "terminated", "killed"],
)
def test_workers_end_with_the_program_and_leave_nothing(kind, number, whole_group, code, play):
    """A signal to the group reaches the workers too: they do not die of it before the program ends them."""
    process = play(kind)
    process.wait_for("played", times=3)
    pids = children(process.pid)
    names = shared_names(process.pid, pids)
    assert sum(name.startswith("sem.") for name in names) > 10
    assert not listed(names)  # so that nobody needs to clean up, however they end
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert process.wait() == code
    assert process.stderr == ""
    assert_nothing_left(pids, names)


def test_a_collector_that_never_closes_after_a_death_ends_the_program(tmp_path):
    """Closing may wait for a lock that a killed worker holds."""
    never = PLAYING.replace("games.weights_changed()", "games._collector.shutdown = lambda **options: signal.pause()")
    short = never.replace("import Games ", "import Games; import torchrl_lang.recipes.collect as collect ")
    short = short.replace("kind, workers =", "collect._GRACE, collect._LAST_RESORT = 0.2, 0.5; kind, workers =")
    (tmp_path / "playing.py").write_text(short)
    process = Program(tmp_path / "playing.py", "async", 2)
    try:
        process.wait_for("played", times=3)
        pids = children(process.pid)
        names = shared_names(process.pid, pids)
        spawned = [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill((spawned or pids)[-1], signal.SIGKILL)
        assert process.wait() == 2
        assert "torchrl_lang: A worker that played games has died" in process.stderr
        assert_nothing_left(pids, names)
    finally:
        process.kill()


def test_a_program_whose_workers_fail_at_once_ends(tmp_path):
    """Before the first batch: nothing that was meant for the workers keeps the interpreter."""
    (tmp_path / "failing.py").write_text(PLAYING.replace("Games(Corridor()", "Games(NoGame()"))
    ended = run(tmp_path / "failing.py", "sync", 2, timeout=180)
    assert ended.returncode == 1
    assert "the level" in ended.stderr


def test_a_start_of_workers_can_be_interrupted(play):
    """While they load what they need, which takes seconds."""
    process = play("sync", fresh_workers=True)
    process.wait_for("begun")
    pids = wait_until(lambda: children(process.pid))  # the first worker
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert time.monotonic() - began < 30
    assert process.stderr == ""
    assert_nothing_left(pids, set())
