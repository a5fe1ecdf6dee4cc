"""What the benchmarks share: rows of figures, timing that stands a busy machine, a table, a record with its machine."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import tensordict
import torch
import torchrl
import transformers

import torchrl_lang

RESULTS = Path(__file__).parent / "results"
HEAD: tuple[str, ...] = ("what", "value", "unit", "target", "", "last time", "now / last")
_chosen: torch.device | None = None
_smoke = False


class Median(float):
    """The median of repeated measurements and the quartiles around it; a plain number in everything else."""

    low: float
    high: float

    def __new__(cls, value: float, low: float, high: float) -> Median:
        self = super().__new__(cls, value)
        self.low, self.high = low, high
        return self

    def __reduce__(self) -> tuple[type, tuple[float, float, float]]:
        return Median, (float(self), self.low, self.high)


def median(values: Iterable[float]) -> Median:
    """Median and quartiles; of a single value, that value."""
    values = list(values)
    if len(values) == 1:
        return Median(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Median(middle, low, high)


def row(
    name: str,
    value: float,
    unit: str,
    target: float | None = None,
    *,
    at_most: bool = False,
    note: str | None = None,
    figure: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A figure; ``ok``: whether it meets its target, None where it has none.

    A :class:`Median` brings its spread along. A note stands below the table, and so does a picture of ``figure``, see
    :func:`benchmarks.figures.draw`.
    """
    ok = None if target is None else (value <= target if at_most else value >= target)
    entry = {"name": name, "value": value, "unit": unit, "target": target, "ok": ok}
    if isinstance(value, Median) and value.low < value.high:  # one run has no spread
        entry |= {"value": float(value), "low": value.low, "high": value.high}
    more = {"note": note, "figure": figure}
    return entry | {key: what for key, what in more.items() if what is not None}


def device() -> torch.device:
    """Where a benchmark that can run on either makes its tensors: a CUDA device where there is one, else the CPU."""
    if _chosen is not None:
        return _chosen
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def using(chosen: torch.device) -> Iterator[None]:
    """``device()`` is ``chosen``; afterwards it is what it was."""
    global _chosen
    before, _chosen = _chosen, chosen
    try:
        yield
    finally:
        _chosen = before


@contextmanager
def smoke(module: ModuleType) -> Iterator[None]:
    """Each job runs once, with the small sizes of the benchmark's ``SMOKE``, uncompiled: its figures mean nothing."""
    global _smoke
    _smoke = True
    try:
        with patch.dict(vars(module), getattr(module, "SMOKE", {})), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _smoke = False


def smoking() -> bool:
    """Whether this is a smoke run, in which each job runs once."""
    return _smoke


@contextmanager
def one_core() -> Iterator[None]:
    """One thread and the same random numbers every time; afterwards both are as they were. Also a decorator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def synchronized() -> None:
    """Wait until the device has done its work; nothing on a CPU."""
    if device().type == "cuda":
        torch.cuda.synchronize(device())


def seconds(job: Callable[[], Any]) -> float:
    """How long a job takes; on a CUDA device by its events, from an idle device until all of its work is done."""
    on = device()
    if on.type != "cuda":
        start = time.perf_counter()
        job()
        return time.perf_counter() - start
    with torch.cuda.device(on):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began.record()
        job()
        ended.record()
        torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000


def interleaved(
    jobs: dict[str, Callable[[], Any]], repeats: int, *, warm_up: bool = True, budget: float = math.inf, least: int = 3
) -> dict[str, list[float]]:
    """Seconds of each job; the jobs take turns, so that a busy moment hits all of them.

    Once ``budget`` seconds are spent no further round begins, unless fewer than ``least`` are done.
    """
    if warm_up and not _smoke:
        for job in jobs.values():
            job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    start = time.perf_counter()
    for turn in range(1 if _smoke else repeats):
        if turn >= least and time.perf_counter() - start > budget:
            break
        for name, job in jobs.items():
            times[name].append(seconds(job))
    return times


def along(
    places: dict[int, dict[str, Callable[[], Any]]], repeats: int, *, budget: float, visits: int = 3
) -> dict[int, dict[str, list[float]]]:
    """Seconds of each place's jobs, :func:`interleaved`; the places, too, take turns, so that a busy minute hits all.

    Each has ``repeats`` rounds, or, once ``budget`` seconds are spent on it, one a visit.
    """
    times: dict[int, dict[str, list[float]]] = {place: {name: [] for name in jobs} for place, jobs in places.items()}
    for visit in range(1 if _smoke else visits):
        for place, jobs in places.items():
            share = budget / visits
            found = interleaved(jobs, repeats // visits, warm_up=visit == 0, budget=share, least=1)
            for name, taken in found.items():
                times[place][name] += taken
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> Median:
    """Median of the ratios of neighbouring runs, with their quartiles."""
    return median(a / b for a, b in zip(times[over], times[under], strict=True))


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    on = device()
    return {
        "device": f"{on.type}: {torch.cuda.get_device_name(on) if on.type == 'cuda' else name}",
        "processor": name,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrl": torchrl.__version__,
        "tensordict": tensordict.__version__,
        "transformers": transformers.__version__,
        "torchrl_lang": torchrl_lang.__version__,
    }


def table(rows: list[dict[str, Any]], before: dict[str, float]) -> str:
    """A plain-text table, beside the values of the last record, and below it the notes."""
    lines = [HEAD, *(cells(entry | {"last": before.get(entry["name"])}) for entry in rows)]
    return "\n".join([*align(lines), *notes(rows)])


def cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """A row of a table, in the order of ``HEAD``: the spread in brackets, and the last record's value beside it."""
    value, last = entry["value"], entry.get("last")
    spread = f" [{short(entry['low'])}, {short(entry['high'])}]" if "low" in entry else ""
    target = "" if entry["target"] is None else f"{entry['target']:,.4g}"
    verdict = {None: "", True: "ok", False: "MISSED"}[entry["ok"]]
    over = f"{value / last:.2f}x" if last and value / last > 0 else ""
    return (
        entry["name"],
        short(value) + spread,
        entry["unit"],
        target,
        verdict,
        "" if last is None else short(last),
        over,
    )


def align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def notes(rows: list[dict[str, Any]]) -> list[str]:
    return [f"* {entry['name']}: {entry['note']}" for entry in rows if "note" in entry]


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def record(rows: list[dict[str, Any]], path: Path) -> dict[str, float]:
    """Write the figures with their machine; returns the values of the record that stood there before."""
    written = compared(rows, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {entry["name"]: entry["last"] for entry in written["rows"] if "last" in entry}


def compared(rows: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """A record of the figures: their machine, and beside each its value in the record at ``path``, if there is one.

    ``changed`` lists differences of machine or versions.
    """
    now = machine()
    if not path.exists():
        return {"machine": now, "rows": rows}
    old = json.loads(path.read_text(encoding="utf-8"))
    last = {entry["name"]: {"last": entry["value"]} for entry in old["rows"]}
    changed = {key: old["machine"].get(key) for key in now if old["machine"].get(key, now[key]) != now[key]}
    return {"machine": now, "changed": changed, "rows": [entry | last.get(entry["name"], {}) for entry in rows]}
