"""Commands killed at every write: what is left is refused or works, and the same command again finishes the work."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns import commands, snapshots
from tests.campaigns.commands import last_lines
from tests.campaigns.isolation import Died, run_forked
from tests.campaigns.kills_of_workers import worker_outcomes
from tests.campaigns.report import Outcome
from tests.campaigns.snapshots import Snapshot, differences
from tests.campaigns.victim import Killer

TIMEOUT = 120.0
WRITTEN_BY_EVALUATE = ("evaluation.json", "table.txt", "transcripts.txt")


@dataclass
class Victim:
    """A command that is killed."""

    name: str
    command: Callable[[Path], list[object]]
    """Gets the folder to write."""
    read: Callable[[Path], Snapshot]
    """What the finished folder holds."""
    before: Path | None = None
    """What stands in the folder before, to be replaced."""
    signal_number: int = signal.SIGKILL
    is_run: bool = True

    def prepare(self, place: Path) -> Path:
        """The folder to write, in ``place``."""
        place.mkdir()
        if self.before is not None:
            shutil.copytree(self.before, place / "out")
        return place / "out"


def victims(home: Path) -> list[Victim]:
    """All commands of one process that write."""
    words, data, start = home / "words.txt", home / "data", home / "start"
    words.write_text("crane\nslate\npurge\nmouse\n")
    for command in (commands.generate(data, words), commands.train("ilql", data, start, "--seed", 3)):
        if commands.call(command).status != 0:
            raise RuntimeError(f"{command} failed")
    other = home / "other"
    commands.call(commands.generate(other, words, "--seed", 9))

    def generate(*more: object) -> Callable[[Path], list[object]]:
        return lambda folder: commands.generate(folder, words, *more)

    def bc(folder: Path) -> list[object]:
        return commands.train("bc", data, folder)

    def ppo(folder: Path) -> list[object]:
        return commands.train_online("ppo", start, folder)

    return [
        Victim("generate", generate(), snapshots.verified_dataset, is_run=False),
        Victim("generate --overwrite", generate("--overwrite"), snapshots.verified_dataset, other, is_run=False),
        Victim("train bc", bc, snapshots.results),
        Victim("train ilql", lambda folder: commands.train("ilql", data, folder), snapshots.results),
        Victim("train ppo", ppo, snapshots.results),
        Victim("train rejection", lambda f: commands.train_online("rejection", start, f), snapshots.results),
        Victim("train bc, SIGTERM", bc, snapshots.results, signal_number=signal.SIGTERM),
        Victim("train ppo, SIGINT", ppo, snapshots.results, signal_number=signal.SIGINT),
        Victim("generate, SIGTERM", generate(), snapshots.verified_dataset, None, signal.SIGTERM, is_run=False),
    ]


@dataclass
class Reference:
    """What a command that nobody kills writes."""

    events: list[str]
    files: list[str]
    found: Snapshot


def campaign(count: int, seed: int, *, only: str | None = None) -> Iterator[Outcome]:
    """Kill each command at ``count`` of its writes, at all where ``count`` is 0.

    ``only`` is a pattern of commands' names; ``single`` is all of one process, ``workers`` are all with several.
    """
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        home, references = Path(name), dict[str, Reference]()
        for victim in victims(home):
            if only in (None, "single") or re.fullmatch(only, victim.name):
                command = victim.name.split(",")[0]  # whatever the signal
                if command not in references:
                    references[command] = _reference(victim, home / "reference")
                yield from _kill(victim, references[command], home, count, seed)
        if only is None or only.startswith("workers"):
            yield from worker_outcomes(home / "start", home, count, seed, only=only)


def _kill(victim: Victim, reference: Reference, home: Path, count: int, seed: int) -> Iterator[Outcome]:
    points = [
        (number, torn)
        for number, event in enumerate(reference.events)
        for torn in ((False, True) if event.startswith(("open", "serialize_file")) else (False,))
    ]
    random = Random(f"{seed} {victim.name}")
    chosen = sorted(random.sample(points, min(count, len(points)))) if count else points
    places = [home / f"kill-{number}-{int(torn)}" for number, torn in chosen]
    for point, place in zip(chosen, places, strict=True):
        event = reference.events[point[0]]
        where = f"{'within' if point[1] else 'before'} {event}"
        attack = f"{victim.name}: at {point[0]} of {len(reference.events)}, {where}"
        (killing,) = run_forked([partial(_suffer, victim, place, *point)], timeout=TIMEOUT)
        problem = _ending(victim, killing)
        if not problem:
            (result,) = run_forked([partial(_recover, victim, place / "out", reference)], timeout=TIMEOUT)
            problem = [result.verdict, result.detail] if isinstance(result, Died) else result
        yield Outcome(victim.name, attack, *problem)
        shutil.rmtree(place)


def _reference(victim: Victim, place: Path) -> Reference:
    (result,) = run_forked([partial(_count, victim, place)], timeout=TIMEOUT)
    if isinstance(result, Died):
        raise RuntimeError(f"{victim.name}: {result.detail}")
    reference = Reference(result, _files(place), victim.read(place / "out"))
    shutil.rmtree(place)
    return reference


def _count(victim: Victim, place: Path) -> list[str]:
    killer = Killer(place, None)
    folder = victim.prepare(place)
    killer.install()
    ended = commands.call(victim.command(folder))
    if ended.status != 0:
        raise RuntimeError(ended.err)
    return killer.events


def _suffer(victim: Victim, place: Path, at: int, torn: bool) -> list[Any]:
    """Runs until the kill."""
    folder = victim.prepare(place)
    Killer(place, at, torn=torn, signal_number=victim.signal_number).install()
    ended = commands.call(victim.command(folder), commands.run_program)
    return [ended.status, ended.complaints]


def _ending(victim: Victim, killing: Any) -> list[str]:
    """What is wrong with how the process ended, or nothing."""
    if isinstance(killing, Died):
        killed = victim.signal_number == signal.SIGKILL and "SIGKILL" in killing.detail
        return [] if killed else [killing.verdict, killing.detail]
    status, complaints = killing
    if victim.signal_number == signal.SIGKILL:
        return ["error in the campaign", "the process was not killed"]
    if any("Traceback" in line for line in complaints):
        return ["traceback", "\n".join(complaints[-12:])]
    # Training announces that it will stop.
    last = [line for line in complaints if "once more stops at once" not in line]
    if status not in (0, 130, 143) or (status and len(last) != 1):
        return ["unclear ending", f"exit status {status}\n" + "\n".join(complaints[-12:])]
    return []


def _files(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def _recover(victim: Victim, folder: Path, reference: Reference) -> list[str]:
    """Use what the killed command left, and call it again; returns verdict and detail."""
    problem = _use_run(folder) if victim.is_run else _use_dataset(victim, folder, reference)
    if problem:
        return problem
    whole = folder.exists() and not victim.is_run and victim.before is None
    ended = commands.call(victim.command(folder))
    if whole and ended.status == 2 and "exists" in (ended.refusal or ""):
        pass  # the dataset was finished before the kill
    elif ended.status != 0:
        return ["does not go on", f"exit status {ended.status}\n{last_lines(ended.err)}"]
    try:
        different = differences(victim.read(folder), reference.found)
    except Exception as error:
        return ["does not go on", f"{type(error).__name__}: {error}"]
    if different:
        return ["other result", f"differs in {len(different)}: {', '.join(different[:5])}"]
    more = sorted(set(_files(folder.parent)) ^ set(reference.files))
    return ["leftover", ", ".join(more)] if more else ["recovered", ""]


def _use_run(folder: Path) -> list[str]:
    """Evaluate the run: it works, or it is said to be unfinished."""
    ended = commands.call(commands.evaluate(folder))
    for name in WRITTEN_BY_EVALUATE:
        (folder / name).unlink(missing_ok=True)
    if ended.status == 0:
        return []
    problem = commands.problem_of_refusal(ended, [str(folder)])
    if not problem and not ("finished" in str(ended.refusal) or "There is no run" in str(ended.refusal)):
        problem = f"not said to be unfinished\n{ended.refusal}"
    return ["unclear refusal", problem] if problem else []


def _use_dataset(victim: Victim, folder: Path, reference: Reference) -> list[str]:
    """Load the dataset: it is the new one, the one before it, or refused."""
    try:
        found = victim.read(folder)
    except (ValueError, OSError) as error:
        clear = len(str(error).splitlines()) == 1 and str(folder) in str(error)
        return [] if clear else ["unclear refusal", str(error)]
    except Exception as error:
        return ["traceback", f"{type(error).__name__}: {error}"]
    same = not differences(found, reference.found)
    if not same and victim.before is not None:
        same = not differences(found, victim.read(victim.before))
    return [] if same else ["silent acceptance", "a dataset that is neither the new nor the old one"]
