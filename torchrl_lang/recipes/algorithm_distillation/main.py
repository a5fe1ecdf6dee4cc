"""Run the distillation demo: train what is missing, evaluate on tasks that no history holds, and report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from torchrl_lang._files import folder_lock, remove_leftovers, write_file, write_json
from torchrl_lang.recipes.algorithm_distillation.formats import FormatOptions
from torchrl_lang.recipes.algorithm_distillation.histories import recording_of
from torchrl_lang.recipes.algorithm_distillation.players import TestPlay, reports
from torchrl_lang.recipes.algorithm_distillation.report import draw_curves, format_report
from torchrl_lang.recipes.compare import run_in_parallel
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.options import check_record, option, with_defaults, write_options

__all__ = ["Distill", "main"]

_RECORD = "options.json"
_QUICK: Mapping[str, Any] = {"size": 7, "episodes": 30, "seeds": 3}


@with_defaults(size=9)
class Distill(FormatOptions):
    """Algorithm distillation beside expert distillation, its source, random and optimal actions, on unseen tasks."""

    out: Path = option(Path("runs/distill"), "folder of all results; the same command continues")
    quick: bool = option(
        False, "a room of 7 x 7, 30 episodes, 3 seeds and 400 steps (of language 1,000), unless they are given"
    )
    methods: tuple[Literal["ad", "ed"], ...] = option(("ad", "ed"), "ad: algorithm distillation; ed: of an expert")
    seeds: int = option(5, "training seeds, from 0 on", at_least=1)
    steps: int = option(2000, "training steps of each run", at_least=1)
    episodes: int = option(40, "episodes of each stream on test tasks, without a change of weights", at_least=6)
    test_streams: int = option(16, "streams of each test task", at_least=1)

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """See :meth:`Options.from_given`; with ``quick`` its values where none are given."""
        if not given.get("quick"):
            return super().from_given(given)
        steps = 1000 if given.get("format") == "language" else 400
        return super().from_given({**_QUICK, "steps": steps, **given})


def main(options: Distill) -> Path:
    """Run it, or what is missing; returns the folder with ``report.txt``, ``results.json`` and ``curves.png``."""
    check_place(options.out)
    recording = recording_of(options)
    digest = None if recording is None else recording.digest
    with folder_lock(options.out, "runs this comparison"):
        remove_leftovers(options.out)
        began, record = time.monotonic(), options.out / _RECORD
        if record.exists():
            free = ("out", "quick", "methods", "seeds", "history")
            check_record(record, options, free=free, history_digest=digest)
        write_options(record, options, history_digest=digest)
        commands = {
            f"{method}-{seed}": _command(options, method, seed)
            for method in options.methods
            for seed in range(options.seeds)
            if not (_place(options, method, seed) / "model").exists()
        }
        run_in_parallel(commands)
        runs: dict[str, list[Path]] = {
            method: [_place(options, method, seed) for seed in range(options.seeds)] for method in options.methods
        }
        play = TestPlay(options, options.episodes, options.test_streams)
        found = reports(play, runs)
        minutes = (time.monotonic() - began) / 60
        text = format_report(found)
        write_file(options.out / "report.txt", text + "\n")
        content = {name: report.as_dict() for name, report in found.items()}
        about = json.loads(json.dumps(asdict(options), default=str))
        write_json(options.out / "results.json", {"options": about, "minutes_of_this_call": minutes, **content})
        draw_curves(options.out / "curves.png", found)
        print(f"\n{text}\n\nreport, curves and all figures: {options.out}; {minutes:.1f} minutes", flush=True)
    return options.out


def _place(options: Distill, method: str, seed: int) -> Path:
    """The folder of a run."""
    return options.out / f"{method}-{seed}"


def _command(options: Distill, method: str, seed: int) -> list[str]:
    """The command that trains a run."""
    changed = replace(options, source="expert", history=None) if method == "ed" else options
    names = [*(field.name for field in fields(FormatOptions)), "steps"]
    given = {name: value for name in names if (value := getattr(changed, name)) is not None}
    evaluation = {"eval_every": max(1, options.steps // 4), "seed": seed, "out": _place(options, method, seed)}
    words = ["train", "ad"]
    for name, value in (given | evaluation).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words
