"""Draw mutants, run the tests that guard each, and list those that survive."""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path

from .mutations import Mutant, changes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchrl_lang"
PLACES = (
    "torchrl_lang/schema.py",
    *(f"torchrl_lang/{path.parent.name}" for path in sorted(PACKAGE.glob("*/__init__.py"))),
)
LIST = Path(__file__).with_name("list.txt")
SIGNATURES = "tests/test_signatures.py"
# Of the copy in which tests run. Without anything else, such as recorded results, tests would fail for all mutants.
LEFT_OUT = (".git", ".venv*", ".*_cache", "runs", "_build", "__pycache__")
HEAVY = ("torchrl.collectors", "torchrl.objectives", "transformers.models.gpt2.modeling_gpt2", "peft", "hypothesis")
# Beside the tests of their own folder, which everything has (``schema.py`` has ``tests/test_schema.py``).
ALSO = {
    "torchrl_lang/functional": ["tests/objectives"],
    "torchrl_lang/modules": ["tests/transforms"],
    "torchrl_lang/schema.py": ["tests/objectives", "tests/data"],
}


def guards(path: Path) -> list[list[str]]:
    """The tests of a file: its examples and those of its folder that name what it defines, the others, all that do."""
    place = path.parts
    files = [ROOT / "tests" / f"test_{path.name}"]
    if len(place) > 2:
        folder = ROOT / "tests" / place[1].lstrip("_")  # the tests of ``_files`` are in ``files``
        if len(place) > 3 and (folder / place[2]).is_dir():
            folder /= place[2]  # a task of ``envs`` has a folder of its own
        files = sorted(folder.glob("test_*.py"))
    files += [file for more in ALSO.get("/".join(place[:2]), []) for file in sorted((ROOT / more).glob("test_*.py"))]
    tree = ast.parse((ROOT / path).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, [path.stem, *names])) + r")\b")
    own = [file for file in files if file.stem == f"test_{path.stem}"]
    naming = own + [file for file in files if file not in own and pattern.search(file.read_text())]
    others = [file for file in files if file not in naming]
    everywhere = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if pattern.search(file.read_text())]
    parts = [ROOT / path, *naming, ROOT / SIGNATURES], others, [file for file in everywhere if file not in files]
    return [[str(file.relative_to(ROOT)) for file in part] for part in parts if part]


def draw(places: list[str], count: int, seed: int) -> list[tuple[Mutant, str]]:
    """A sample of the mutants of these files, as many of each place as of the others; the same for the same seed."""
    sample = []
    for number, place in enumerate(places):
        files = [ROOT / place] if place.endswith(".py") else _sources(ROOT / place)
        found = [each for file in files for each in changes(file.relative_to(ROOT), file.read_text())]
        share = count * (number + 1) // len(places) - count * number // len(places)
        sample += random.Random(seed).sample(found, min(share, len(found)))
    return [(change.mutant(), change.source()) for change in sample]


def kept(places: list[str]) -> tuple[list[tuple[Mutant, str]], list[str]]:
    """The mutants of the list that died, of these places, and its lines that change nothing in the files of today."""
    listed: dict[str, dict[tuple[str, str], int]] = {}
    for number, line in enumerate(LIST.read_text(encoding="utf-8").splitlines(), 1):
        word, path, before, after = line.split("\t")
        if word == "dies" and any(Path(path).is_relative_to(place) for place in places):
            listed.setdefault(path, {})[before, after] = number
    found, stale = [], []
    for path, pairs in sorted(listed.items()):
        unparse = functools.cache(ast.unparse)  # a statement has many changes
        file, missing = ROOT / path, dict(pairs)
        for change in changes(Path(path), file.read_text()) if file.exists() else ():
            if any(before in unparse(change.statement) for before, _ in pairs):
                mutant = change.mutant()
                found += [(mutant, change.source())] if (mutant.before, mutant.after) in pairs else []
                missing.pop((mutant.before, mutant.after), None)
        stale += [f"{LIST.name}:{number}: {path}: {before}" for (before, _), number in missing.items()]
    return found, stale


def _sources(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]


def verdict(mutant: Mutant, text: str, tree: Path, limit: float) -> str:
    """``dies`` where a guarding test fails with the mutant in its place, ``SURVIVES`` where none does.

    ``hangs`` where the tests do not end in time: which is noticed, unless the machine is merely slow.
    """
    target = tree / mutant.path
    original = target.read_text()
    target.write_text(text)
    try:
        for marker, stage in product(("not slow", "slow"), guards(mutant.path)):
            code = _in_fork(functools.partial(_pytest, ["-m", marker, *stage], tree), limit)
            if code not in (0, 5):  # 5: a file without an example, and no test that names it
                return "hangs" if code == -1 else "dies"
        return "SURVIVES"
    finally:
        target.write_text(original)
        shutil.rmtree(tree / ".pytest_cache", ignore_errors=True)  # TextWorld's games, which a mutant may have built


def _pytest(arguments: list[str], tree: Path) -> int:
    import pytest

    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "torchrl_lang")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(tree)
    return pytest.main(["-x", "-q", "--no-header", *arguments])


def _in_fork(work: Callable[[], int], limit: float) -> int:
    """What ``work`` returns in a process of its own; -1 where it is stopped at the time limit.

    Forked, because importing torch takes longer than most of the tests.
    """
    process = os.fork()
    if process == 0:
        os.setsid()
        silent = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        code = 2
        try:
            code = int(work())
        finally:
            os._exit(code)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=list(PLACES), help="files and folders of the package")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a part of the tests")
    parser.add_argument("--write", action="store_true", help=f"add the mutants with their ends to {LIST.name}")
    parser.add_argument("--kept", action="store_true", help=f"try those of {LIST.name} that died, which should again")
    options = parser.parse_args()
    if options.kept:
        sample, stale = kept(options.places)
        if stale:
            print("Skipped, as no file has these lines any more; replace them by others:", *stale, sep="\n")
    else:
        sample = draw(options.places, options.count, options.seed)
    for name in HEAVY:
        import_module(name)

    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        alive = []
        for number, (mutant, text) in enumerate(sample, 1):
            began = time.monotonic()
            word = verdict(mutant, text, tree, options.limit)
            alive += [mutant] if word == "SURVIVES" else []
            if options.write:
                with LIST.open("a", encoding="utf-8") as file:
                    file.write("\t".join([word, str(mutant.path), mutant.before, mutant.after]) + "\n")
            print(f"[{number}/{len(sample)}] {word} after {time.monotonic() - began:.0f} s: {mutant}", flush=True)
    print(f"\n{len(alive)} of {len(sample)} mutants survive:", *alive, sep="\n")


if __name__ == "__main__":
    main()
