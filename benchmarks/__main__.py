"""Run benchmarks and print one table: ``python -m benchmarks [--quick | --smoke] [--device cpu|cuda] [NAME ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import figures, overview
from benchmarks.common import RESULTS, compared, device, machine, record, smoke, using

NAMES = (
    "wordle_env",
    "data_pipeline",
    "training_step",
    "rivals",
    "agilerl_terms",
    "large_vocabulary",
    "decoding",
    "online",
    "chat_model",
    "textworld_env",
    "visual_dialogue_server",
    "kl_transforms",
    "scaling",
    "plan_check",
    "ad_rollout",
    "ad_sources",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record; 1 where a figure missed its target, else 0."""
    options = _options(arguments)
    chosen = torch.device(options.device) if options.device else device()
    print(_place(chosen), flush=True)
    records: overview.Records = {}
    try:
        for name in options.names or NAMES:
            records[name] = _smoke(name, chosen) if options.smoke else _measure(name, chosen, options.quick)
    finally:  # what was measured is shown, whatever came after it
        print(f"\n{overview.text(records)}")
    return int(any(entry["ok"] is False for found in records.values() for entry in found["rows"]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(NAMES)} (default: all)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer repetitions; nothing is recorded")
    size.add_argument(
        "--smoke", action="store_true", help="every job once, small, in seconds: its figures mean nothing"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a CUDA device where there is one")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose among {', '.join(NAMES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device was found; leave it out to measure on the CPU")
    return options


def _place(chosen: torch.device) -> str:
    with using(chosen):
        what = f"Measuring on {machine()['device']}"
    if chosen.type == "cuda":
        return f"{what}; benchmarks of the processor's work stay on the CPU."
    return f"{what}." if torch.cuda.is_available() else f"{what}; no CUDA device found."


def _benchmark(name: str, chosen: torch.device) -> tuple[ModuleType, torch.device]:
    """The benchmark and where it runs: one with ON_CUDA makes its tensors on device(), others measure the CPU."""
    module = importlib.import_module(f"benchmarks.{name}")
    return module, chosen if getattr(module, "ON_CUDA", False) else torch.device("cpu")


def _smoke(name: str, chosen: torch.device) -> dict[str, Any]:
    """Run a benchmark's code without measuring: nothing is compared with a target or recorded."""
    module, on = _benchmark(name, chosen)
    print(f"\n{name} on {on}: a smoke run", flush=True)
    with using(on), smoke(module):
        rows = [entry | {"target": None, "ok": None} for entry in module.run(quick=True)]
    return {"machine": machine(), "rows": rows}


def _measure(name: str, chosen: torch.device, quick: bool) -> dict[str, Any]:
    """Run one benchmark; unless it is a quick look, record it and draw its figures."""
    module, on = _benchmark(name, chosen)
    folder = RESULTS if on.type == "cpu" else RESULTS / on.type
    about = (module.__doc__ or "").split("\n\n")[0]
    print(f"\n{name} on {on}: {about}", flush=True)
    began = time.perf_counter()
    with using(on):
        rows = module.run(quick=quick)
        found = compared(rows, folder / f"{name}.json")
        if not quick:
            record(rows, folder / f"{name}.json")
    missed = sum(entry["ok"] is False for entry in rows)
    print(f"  {len(rows)} figures, {missed} missed, {time.perf_counter() - began:,.0f} s", flush=True)
    if not quick:
        _draw(rows, folder)
        page = overview.markdown(overview.recorded(folder, NAMES))
        (folder / "table.md").write_text(page, encoding="utf-8")
    return found


def _draw(rows: list[dict[str, Any]], folder: Path) -> None:
    try:
        for entry in rows:
            if "figure" in entry:
                figures.draw(entry["figure"], folder)
    except ImportError as error:
        print(f"  no pictures: {error}")


if __name__ == "__main__":
    sys.exit(main())
