"""All that needs a GPU, tested and timed within minutes on a bare machine: ``python -m benchmarks.gpu``.

The machine has PyTorch for CUDA, transformers and pytest; the other packages come as wheels for its Python, and the
machine needs no network::

    python -m benchmarks.gpu --pack wheels --python 3.12  # here; then copy this project with the wheels
    pip install --no-deps --no-index --target site wheels/*.whl  # there
    PYTHONPATH=site:. python -m benchmarks.gpu --out gpu.md

The table has the tests by function, those that were skipped with the reason, and the figures of quick benchmarks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import machine
from torchrl_lang._files import write_file

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("annotated-types", "docstring-parser", "gguf", "hoptorch", "importlib-metadata", "orjson", "pydantic"),
    *("pydantic-core", "pyvers", "tensordict", "torchrl", "typeguard", "typing-inspection", "tyro", "zipp"),
)
"""Those that a machine with PyTorch and transformers lacks."""
TESTS = ("tests/test_cuda.py",)
BENCHMARKS = ("training_step", "large_vocabulary", "decoding", "wordle_env", "kl_transforms")
MINUTES = 10.0
MOST = 64 * 2**20
"""Bytes of the wheels."""


class Outcome(NamedTuple):
    """The outcome of the cases of a test function, or of a benchmark."""

    name: str
    result: str
    seconds: float


def pack(folder: Path, python: str) -> int:
    """Download the wheels for a version of Python on Linux; returns their bytes.

    Raises:
        ValueError: pip found no wheel of a package, or the wheels are too large to carry.
    """
    pins = [line for line in (ROOT / "constraints.txt").read_text().split() if _name(line) in PACKAGES]
    platforms = [f"--platform=manylinux{kind}_x86_64" for kind in ("_2_28", "_2_17", "2014", "1")]
    command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    missing = sorted({*PACKAGES} - {_name(pin) for pin in pins})
    if subprocess.run([sys.executable, "-m", *command, "--dest", str(folder), *pins, *missing], check=False).returncode:
        raise ValueError(f"pip found no wheels for Python {python} (its message is above): give another --python.")
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size > MOST:
        raise ValueError(
            f"the wheels in {folder} have {size:,} bytes, at most {MOST:,} are carried: remove older ones."
        )
    return size


def _name(pin: str) -> str:
    return pin.partition("==")[0].lower().replace("_", "-")


def tested(path: Path) -> Iterator[Outcome]:
    """The outcomes of the test functions in a report of pytest (JUnit's XML)."""
    cases: dict[str, list[Outcome]] = {}
    for case in ET.parse(path).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case if child.tag in ("failure", "error", "skipped")}
        result = next((f"{kind}: {message}".splitlines()[0] for kind, message in kinds.items()), "passed")
        name = f"{case.get('classname')}.{str(case.get('name')).partition('[')[0]}"
        cases.setdefault(name, []).append(Outcome(name, result, float(case.get("time", 0.0))))
    for name, own in cases.items():
        number = Counter(each.result for each in own)
        text = "; ".join(result if len(own) == 1 else f"{count} {result}" for result, count in number.items())
        yield Outcome(name, text, sum(each.seconds for each in own))


def run(minutes: float) -> list[Outcome]:
    """Run the tests and the benchmarks, one after the other; what no time is left for is named as not run."""
    until, found = time.monotonic() + 60 * minutes, list[Outcome]()
    with tempfile.TemporaryDirectory() as home:
        for name, words in _jobs(Path(home)):
            began, left = time.monotonic(), until - time.monotonic()
            if left < 1:
                found.append(Outcome(name, "not run: no time was left", 0.0))
                continue
            try:
                code = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, timeout=left, check=False).returncode
                result = {0: "passed"}.get(code, f"ended with {code}")
            except subprocess.TimeoutExpired:
                result = "ended: no time was left"
            found.append(Outcome(name, result, time.monotonic() - began))
        report = Path(home) / "report.xml"
        return [*(tested(report) if report.exists() else ()), *found]


def _jobs(home: Path) -> Iterator[tuple[str, list[str]]]:
    given = ["-q", "-p", "no:cacheprovider", f"--junitxml={home / 'report.xml'}"]
    yield "all tests", ["pytest", *given, *TESTS]
    for name in BENCHMARKS:
        yield f"benchmark {name}", ["benchmarks", "--quick", "--device", "cuda", name]


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    lines = [f"| {each.name} | {each.result.replace('|', '/')} | {each.seconds:.1f} |" for each in outcomes]
    return "\n".join([f"Measured on {about}.", "", "| what | result | seconds |", "|---|---|---|", *lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or run and write the table; 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="download the wheels into this folder, and end")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (default: 3.12)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most so long (default: {MINUTES:g})")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.md"), help="file of the table")
    options = parser.parse_args(arguments)
    if options.pack:
        print(f"{pack(options.pack, options.python) / 2**20:.1f} MiB of wheels in {options.pack}")
        return 0
    found = run(options.minutes)
    write_file(options.out, table(found))
    print(f"\n{table(found)}")
    return int(any(each.result.startswith("ended") for each in found))  # so does pytest where a test fails


if __name__ == "__main__":
    sys.exit(main())
