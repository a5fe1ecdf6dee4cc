"""Kills of runs whose games are played by worker processes: nothing may stay behind, in files, processes or memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.campaigns import commands
from tests.campaigns.commands import last_lines
from tests.campaigns.report import Outcome
from tests.campaigns.victim import descendants, shared_memory

MARK = "TORCHRL_LANG_CAMPAIGN"
"""The environment variable by which the processes of one attack are found."""
PATIENCE = 30.0
"""Seconds in which workers must have noticed that their parent is gone."""


@dataclass
class Ending:
    """How a run ended, and what it left."""

    status: int
    err: str
    memory: set[str]
    events: list[str]
    processes: list[int]


def worker_outcomes(start: Path, home: Path, count: int, seed: int, *, only: str | None) -> Iterator[Outcome]:
    """Kill runs with both kinds of collectors: the main process at its writes, a worker, all at once by Ctrl-C."""
    random = Random(f"{seed} workers")
    for kind in ("sync", "async"):
        name = f"workers, {kind}"
        if only not in (None, "workers", name):
            continue
        place = home / f"workers-{kind}"
        whole = _run(start, place / "whole", kind)
        if whole.status != 0:
            yield Outcome(name, f"{name}: not killed", "does not go on", last_lines(whole.err))
            continue
        files = _files(place / "whole")
        number = len(whole.events)
        points = range(number) if not count else sorted(random.sample(range(number), min(count, number)))
        for at in points:
            folder = place / f"at-{at}"
            torn = random.random() < 0.5
            ended = _run(start, folder, kind, at=at, torn=torn)
            # Workers play other games each time, so other checkpoints may be best, and a run may write less often.
            while ended.status == 0 and len(ended.events) <= at:
                shutil.rmtree(folder)
                at = len(ended.events) - 1
                ended = _run(start, folder, kind, at=at, torn=torn)
            attack = f"{name}: main process at {at} of {number}, {whole.events[at]}"
            yield Outcome(name, attack, *_after(ended, start, folder, kind, files, -signal.SIGKILL))
        for target in ("a worker", "Ctrl-C"):
            folder = place / target.replace(" ", "-")
            ended = _run(start, folder, kind, target=target)
            status = 2 if target == "a worker" else 130
            yield Outcome(name, f"{name}: {target}", *_after(ended, start, folder, kind, None, status))
        shutil.rmtree(place)


def _run(start: Path, folder: Path, kind: str, *, at: int = -1, torn: bool = False, target: str = "") -> Ending:
    """Run until the end or the kill, and wait for what is left of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    words, mark = folder.with_name(f"{folder.name}.words"), uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.campaigns.victim"]
    command += [str(folder), str(at), str(torn), str(int(signal.SIGKILL)), str(words)]
    process = subprocess.Popen(
        [*command, *map(str, _command(start, folder, kind, bool(target)))],
        env={**commands.environment(), MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    memory = _strike(process.pid, folder, target) if target else set()
    try:
        _, err = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        err += "\nhangs"
    processes = _wait_for_end(mark)
    found = json.loads(words.read_text()) if words.exists() else []
    words.unlink(missing_ok=True)
    killed = process.returncode == -signal.SIGKILL
    memory |= set(found) if killed else set()
    left = {path for path in memory if Path(path).exists()}
    return Ending(process.returncode, err, left, [] if killed else found, processes)


def _command(start: Path, folder: Path, kind: str, longer: bool) -> list[object]:
    more: list[object] = ["--collector", kind, "--workers", 2]
    return commands.train_online("ppo", start, folder, *more, *(["--iterations", 4000] if longer else []))


def _strike(process: int, folder: Path, target: str) -> set[str]:
    """Kill a worker, or interrupt the whole group, once a checkpoint is there. Returns the shared memory in use."""
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    memory = shared_memory(process)
    if target == "Ctrl-C":
        os.killpg(process, signal.SIGINT)
    else:
        workers = [one for one in descendants(process) if b"spawn_main" in _command_line(one)]
        os.kill(workers[0], signal.SIGKILL)
    return memory


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _wait_for_end(mark: str) -> list[int]:
    """Processes of the attack that do not end in time; they are killed then."""
    deadline = time.monotonic() + PATIENCE
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return left


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _after(ended: Ending, start: Path, folder: Path, kind: str, files: set[str] | None, status: int) -> tuple[str, str]:
    """Verdict and detail: how the run ended, what is left, and whether the same command goes on."""
    if ended.status != status or "hangs" in ended.err:
        return "unclear ending", f"exit status {ended.status}, expected {status}\n{last_lines(ended.err)}"
    if status > 0 and ("Traceback" in ended.err or "terminate called" in ended.err):
        return "traceback", last_lines(ended.err)
    if ended.processes or ended.memory:
        return "leftover", f"processes {ended.processes}, shared memory {sorted(ended.memory)}"
    if files is None:  # a run too long to be finished: its files are compared where the main process was killed
        left = [name for name in _files(folder) if "writing" in name or ".partial" in name or ".old" in name]
        return ("leftover", ", ".join(left)) if left else ("recovered", "")
    again = _run(start, folder, kind)
    if again.status != 0:
        return "does not go on", last_lines(again.err)
    if again.processes or again.memory:
        return "leftover", f"processes {again.processes}, shared memory {sorted(again.memory)}"
    judged = commands.call(commands.evaluate(folder))
    if judged.status != 0:
        return "does not go on", last_lines(judged.err)
    # The checkpoints at hand depend on which is best, and workers play other games each time.
    expected = ("checkpoints/step-", "evaluation.json", "table.txt", "transcripts.txt")
    more = {name for name in _files(folder) ^ files if not name.startswith(expected)}
    return ("leftover", ", ".join(sorted(more))) if more else ("recovered", "")
