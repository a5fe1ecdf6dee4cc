"""Programs and workers that begin with everything imported: one server imports it, and forks for each of them.

Importing torch, TorchRL and Transformers takes seconds, and most tests that need another process are not about that.
Workers are still given what they need by pickling it, as ``spawn`` does; a test of ``spawn`` itself asks for it.

Workers that must be children of the process that starts them are forked from that process itself: they are started as
``spawn`` starts them, with the same arguments, open files and pickled objects, but in an interpreter that has imported
everything already. A :class:`Program` does so unless it is given ``fresh_workers=True``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
import torch

METHOD = "forkserver"
IMPORTED = [
    "tests.garbage",
    "torchrl_lang.recipes.online_algorithms",
    "torchrl_lang.recipes.token_values",
    "torchrl_lang.envs.games",
    "torchrl_lang.transforms",
    "torchrl.collectors",
    "torchrl.objectives",
    "torchrl_lang.modules.agilerl.model",
    "torchrl_lang.modules.decoding.gpt2_step",
    "tests.imported",
]


def use_a_server() -> None:
    """Make the server the way in which this process starts others, where the platform has one."""
    if METHOD in multiprocessing.get_all_start_methods():
        multiprocessing.get_context(METHOD).set_forkserver_preload(IMPORTED)
        multiprocessing.set_start_method(METHOD, force=True)


@contextmanager
def spawned() -> Iterator[None]:
    """Within, this process is the parent of its workers, as it is not of the server's."""
    multiprocessing.set_start_method("spawn", force=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork)
        yield
    use_a_server()


_START = util.spawnv_passfds


def _fork(path: bytes, arguments: list[str], files: list[int]) -> int:
    """Do in a fork what ``spawn`` would have a new interpreter do."""
    if "--multiprocessing-fork" not in arguments or torch.cuda.is_initialized():  # CUDA does not survive a fork
        return _START(path, arguments, files)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    return pid or _work(arguments, files)


def _work(arguments: list[str], files: list[int]) -> int:
    code = 1
    try:
        forget_the_parent(files)
        for name, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            signal.signal(name, handler)
        place = arguments.index("-c") + 1
        sys.argv = ["-c", *arguments[place + 1 :]]
        exec(arguments[place], {})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def forget_the_parent(files: Iterable[int]) -> None:
    """In a fork: keep nothing of the parent but what it has imported, its output and the files with these numbers."""
    gc.freeze()  # its objects must not close what gets the numbers of their files
    util._run_after_forkers()  # while the files are open that some of them close
    torch.set_num_threads(1)  # its threads are not here
    before = 3
    for number in sorted(map(int, files)):
        os.closerange(before, number)
        before = number + 1
    os.closerange(before, os.sysconf("SC_OPEN_MAX"))


class Program:
    """``python ARGUMENTS`` in a process and a group of its own, forked from the server; its output goes to files."""

    def __init__(self, *arguments: object, cwd: object = None, fresh_workers: bool = False, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        context: Any = multiprocessing.get_context(METHOD)
        call = [str(argument) for argument in arguments]
        where = os.getcwd() if cwd is None else str(cwd)
        self.process = context.Process(target=_run, args=(call, where, variables, self._files, fresh_workers))
        self.process.start()
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        """What the program ended with, a signal as its negative number; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the program alone, not to what it started."""
        os.kill(self.pid, number)

    def wait_for(self, line: str, times: int = 1, timeout: float = 120.0) -> None:
        """Wait until the program has printed a line this often."""
        until = time.monotonic() + timeout
        while self.stdout.splitlines().count(line) < times:
            assert self.returncode is None, self.stderr
            assert time.monotonic() < until, f"the program has not printed {line!r} {times} times"
            time.sleep(0.01)

    @property
    def stdout(self) -> str:
        """What the program has printed so far."""
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def stderr(self) -> str:
        """What it has printed to its standard error so far."""
        return self._files[1].read_text() if self._files[1].exists() else ""

    def kill(self) -> None:
        """End it and all of its group."""
        if self.process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()


def wait_until(condition: Callable[[], Any], seconds: float = 200.0) -> Any:
    """What is found of a condition, as soon as it holds."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def is_running(pid: int) -> bool:
    """Whether the process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def semaphores(pid: int) -> str:
    """With what the names of a program's semaphores begin: forks of a process do not show them in their maps."""
    return f"/mp-of-{pid}"


def run(*arguments: object, timeout: float = 120.0, **options: Any) -> Program:
    """Run a program to its end."""
    program = Program(*arguments, **options)
    try:
        program.wait(timeout)
    finally:
        program.kill()
    return program


def _run(arguments: list[str], cwd: str, variables: dict[str, str], files: list[Path], fresh_workers: bool) -> None:
    os.setsid()
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(variables)
    os.chdir(cwd)
    multiprocessing.current_process()._config["semprefix"] = semaphores(os.getpid())
    multiprocessing.set_start_method("spawn", force=True)  # whatever the program starts, it starts as it would
    if not fresh_workers:
        util.spawnv_passfds = _fork
    _interpret(arguments)


def _interpret(arguments: list[str]) -> None:
    """What the interpreter does with these arguments; an error ends in :class:`SystemExit`."""
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


class Forked(subprocess.Popen):
    """``Popen([python, *arguments], stdout=PIPE, stderr=STDOUT, text=True)`` in a fork of this process."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: int, stderr: int, text: bool) -> None:
        assert (command[0], stdout, stderr, text) == (sys.executable, subprocess.PIPE, subprocess.STDOUT, True)
        self.args, self.returncode, self._waitpid_lock = command, None, threading.Lock()
        self.stdin = self.stderr = None
        self._child_created = True
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._work(command[1:], env, write)
        os.close(write)
        self.stdout = os.fdopen(read)

    @staticmethod
    def _work(arguments: list[str], variables: dict[str, str], output: int) -> None:
        code = 1
        try:
            for number in (1, 2):
                os.dup2(output, number)
            forget_the_parent([])
            resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # the parent's
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            os.environ.update(variables)
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(number, handler)
            _interpret(arguments)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
