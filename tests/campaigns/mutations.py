"""Damaged copies of everything that the library reads: each must be refused in one line, or read as the original."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from tests.campaigns import commands
from tests.campaigns.artifacts import Artifact, Use, build
from tests.campaigns.commands import Ended, last_lines
from tests.campaigns.isolation import Died, captured, run_forked
from tests.campaigns.mutators import MUTATORS, TRAP, Mutator, Nothing
from tests.campaigns.report import Outcome
from tests.campaigns.snapshots import differences

STRUCTURAL = ("tensor_drop", "tensor_rename", "tensor_change_d", "tensor_change_s", "tensor_change_o", "tensor_nan")
STRUCTURAL += ("tensor_huge", "tree_foreign", "tree_pickled", "file_cut", "file_make", "file_link_to", "file_delete")
STRUCTURAL += ("json_other_model", "json_not_utf8", "json_deep", "json_a_list", "json_comma", "json_long")
"""Beginnings of the names of what can be noticed in a folder without checksums."""
PROGRAM_EVERY, SUBPROCESS_EVERY = 20, 100
TIMEOUT = 60.0


@dataclass(frozen=True)
class Mutant:
    """One damaged copy, the same for the same seed and number."""

    number: int
    artifact: Artifact
    file: Path
    mutator: Mutator
    seed: int

    @property
    def name(self) -> str:
        return f"{self.number} {self.artifact.name}/{self.file} {self.mutator.name}"

    def damage(self, folder: Path) -> bool:
        """Damages a copy of the artifact; returns whether something differs."""
        before = digest_of(folder.parent)
        with suppress(Nothing):
            self.mutator.apply(folder / self.file, Random(f"{self.seed} {self.number}"))
        return digest_of(folder.parent) != before or self.mutator.name == "tree_other_time"


def digest_of(folder: Path) -> str:
    """Changes with any content, name or kind of a file below ``folder``."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found.append((str(path.relative_to(folder)), path.is_symlink(), path.is_dir(), content))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def choose(artifacts: list[Artifact], count: int, seed: int) -> Iterator[Mutant]:
    """Mutants such that each mutator, and then each file, occurs as often as any other."""
    pairs = [
        (artifact, file, mutator)
        for artifact in artifacts
        for file in artifact.files()
        for mutator in MUTATORS.values()
        if mutator.fits(file) and (artifact.checked or mutator.name.startswith(STRUCTURAL))
    ]
    random, mutators, files, costs = Random(seed), Counter[str](), Counter[str](), Counter[str]()
    taken = Counter[tuple[str, str, str]]()
    for number in range(count):
        artifact, file, mutator = min(
            pairs,
            key=lambda pair: (
                mutators[pair[2].name],
                taken[pair[0].name, str(pair[1]), pair[2].name],
                costs[pair[0].name],
                files[f"{pair[0].name}/{pair[1]}"],
                random.random(),
            ),
        )
        mutators[mutator.name] += 1
        files[f"{artifact.name}/{file}"] += 1
        costs[artifact.name] += artifact.cost
        taken[artifact.name, str(file), mutator.name] += 1
        yield Mutant(number, artifact, file, mutator, seed)


def attack(mutant: Mutant, home: Path) -> list[list[str]]:
    """Damage a copy and use it in every way; returns ``[use, verdict, detail]`` of each."""
    place = home / f"mutant-{mutant.number}"
    folder = place / mutant.artifact.folder.name
    shutil.copytree(mutant.artifact.folder, folder)
    trap = place / "foreign code ran here"
    os.environ[TRAP] = str(trap)
    try:
        if not mutant.damage(folder):
            return []
        names = [str(place), *{path.name for path in mutant.artifact.folder.rglob("*")}, mutant.file.name]
        found = []
        for use in mutant.artifact.uses:
            verdict, detail = _use(use, folder, mutant, names)
            if trap.exists():
                verdict, detail = "foreign code ran", ""
            found.append([use.name, verdict, detail])
        return found
    finally:
        with suppress(OSError):
            shutil.rmtree(place)


def _use(use: Use, folder: Path, mutant: Mutant, names: list[str]) -> tuple[str, str]:
    excused = not (folder / mutant.file).parent.exists()
    if use.command is None:
        return _call(use, folder, names, excused=excused)
    ended = _way_to_call(mutant.number)(use.command(folder))
    if ended.status == 0 and "Traceback (most recent call last)" not in ended.err:
        try:
            return _judge(use, use.read(folder), announced=_announced(ended, names), excused=excused)
        except (OSError, ValueError, KeyError) as error:
            return "unusable result", f"{type(error).__name__}: {error}"
    problem = commands.problem_of_refusal(ended, names)
    if not problem:
        return "refused", ended.refusal or ""
    return ("traceback" if problem.startswith("a traceback") else "unclear refusal"), problem


def _way_to_call(number: int) -> Callable[[list[object]], Ended]:
    """Most commands are called as a function, some with the program's handlers, few in an interpreter of their own."""
    if number % SUBPROCESS_EVERY == SUBPROCESS_EVERY - 1:
        return commands.call_in_subprocess
    return partial(commands.call, run=commands.run_program) if number % PROGRAM_EVERY == 7 else commands.call


def _call(use: Use, folder: Path, names: list[str], *, excused: bool) -> tuple[str, str]:
    """A call of the Python API."""
    with warnings.catch_warnings(record=True) as warned, captured(commands.ANSWERS) as streams:
        warnings.simplefilter("always")
        try:
            found = use.read(folder)
            error = None
        except Exception as raised:
            error = raised
    if error is None:
        said = "\n".join([streams.out, streams.err, *(str(warning.message) for warning in warned)])
        return _judge(use, found, announced=_announced(Ended(0, "", said), names), excused=excused)
    text = str(error)
    if not isinstance(error, (ValueError, OSError)):
        return "traceback", f"{type(error).__name__}: {last_lines(text)}"
    if len(text.splitlines()) != 1 or len(text) > 1500 or not any(name in text for name in names):
        return "unclear refusal", f"{type(error).__name__}: {last_lines(text)}"
    return "refused", text


def _announced(ended: Ended, names: list[str]) -> bool:
    """Whether a line says that something is wrong with a file."""
    words = ("damaged", "is not", "is missing", "skipped", "checksum", "cannot", "has no")
    lines = f"{ended.out}\n{ended.err}".splitlines()
    return any(any(word in line for word in words) and any(name in line for name in names) for line in lines)


def _judge(use: Use, found: dict[str, object], *, announced: bool, excused: bool) -> tuple[str, str]:
    """Compare what was read with the original.

    Args:
        use: what was done.
        found: what was read.
        announced: a message said that something is wrong.
        excused: the user has deleted a whole folder, such as a checkpoint's, so that what came before it is right.
    """
    different = differences(found, use.original)
    if not different:
        return ("refused", "and what came before it was used") if announced else ("harmless", "")
    if (announced or excused) and use.fallback is not None and not differences(found, use.fallback):
        return ("refused" if announced else "harmless"), "and the one before it was used"
    return "silent acceptance", f"differs in {len(different)}: {', '.join(different[:5])}"


def campaign(count: int, seed: int, *, only: int | None = None) -> Iterator[Outcome]:
    """Attack ``count`` mutants; ``only`` one of them where a number is given."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        home = Path(name)
        artifacts = build(home / "artifacts")
        mutants = [mutant for mutant in choose(artifacts, count, seed) if only in (None, mutant.number)]
        results = run_forked([partial(attack, mutant, home) for mutant in mutants], timeout=TIMEOUT)
        for mutant, result in zip(mutants, results, strict=True):
            yield from _outcomes(mutant, result)


def _outcomes(mutant: Mutant, result: Died | list[list[str]]) -> list[Outcome]:
    """One outcome for each mutant: the worst of its uses."""
    if isinstance(result, Died):
        return [Outcome(mutant.artifact.name, mutant.name, result.verdict, result.detail)]
    found = [Outcome(mutant.artifact.name, f"{mutant.name}: {use}", *rest) for use, *rest in result]
    failed = [outcome for outcome in found if outcome.failed]
    return failed[:1] or found[-1:]
