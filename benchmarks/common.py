"""What the benchmarks share: rows of figures, timing that stands a busy machine, a table, a record with its machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl
import transformers

import torchrl_lang

RESULTS = Path(__file__).parent / "results"


def row(
    name: str, value: float, unit: str, target: float | None = None, *, at_most: bool = False, note: str | None = None
) -> dict[str, Any]:
    """A figure; ``ok`` says whether it meets its target, None where it has none. A note stands below the table."""
    ok = None if target is None else (value <= target if at_most else value >= target)
    entry = {"name": name, "value": value, "unit": unit, "target": target, "ok": ok}
    return entry if note is None else entry | {"note": note}


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


def interleaved(jobs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each job; the jobs take turns, so that a busy moment hits all of them."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - began)
    return times


def ratio(times: dict[str, list[float]], over: str, under: str) -> float:
    """Median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(times[over], times[under], strict=True))


def machine() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {
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
    """A plain-text table, beside the values of the last record, and below it what cannot be said in numbers."""
    notes = [f"* {entry['name']}: {entry['note']}" for entry in rows if "note" in entry]
    lines = [("what", "value", "unit", "target", "", "last time")]
    for entry in rows:
        target = "" if entry["target"] is None else f"{entry['target']:,.4g}"
        verdict = {None: "", True: "ok", False: "MISSED"}[entry["ok"]]
        last = before.get(entry["name"])
        shown = "" if last is None else _short(last)
        lines.append((entry["name"], _short(entry["value"]), entry["unit"], target, verdict, shown))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    cells = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(cells + notes)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def record(rows: list[dict[str, Any]], path: Path) -> dict[str, float]:
    """Write the figures with their machine; returns the values of the record that stood there before."""
    before = {}
    if path.exists():
        before = {entry["name"]: entry["value"] for entry in json.loads(path.read_text())["rows"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return before
