"""How time and peak memory grow: with vocabulary, row length and batch in training, with the number of envs in play."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.common import along, device, median, one_core, ratio, row
from benchmarks.figures import described
from benchmarks.large_vocabulary import LAYERS, WIDTH, Case, cleared_steps, make_batch, make_loss, make_model
from benchmarks.memory import peak_bytes
from benchmarks.naive_ilql import NaiveILQL
from benchmarks.scaling_envs import measure_envs

ON_CUDA = True
PLAIN, NAIVE = "plain step", "naive ILQL, CQL on"
OFF, ON = "ILQL, CQL off", "ILQL, CQL on"
BASE = Case(vocabulary=4096, rows=8, length=64, rows_for_memory=8, lighter={})
AXES: dict[str, tuple[str, Sequence[int], Sequence[int]]] = {  # how it is called, its places, those of a quick look
    "vocabulary": ("vocabulary", (32, 512, 4096, 32_000, 50_257, 151_936), (32, 4096, 32_000)),
    "length": ("row length", (64, 128, 256, 512, 1024), (64, 256)),
    "rows": ("batch", (8, 16, 32, 64, 128, 256), (8, 64)),
}
SMOKE = {"AXES": {"vocabulary": ("vocabulary", (), (32, 256))}, "BASE": BASE._replace(rows=4, length=16)}
ROUNDS, BUDGET = 15, 4.0  # rounds of a place at most; the seconds after which as few as three are enough
TABLES = 12  # with a number for each position and token: the most that the naive form holds


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    budget = 0.5 if quick else BUDGET
    rows = []
    for field, (_, places, few) in AXES.items():
        rows += _axis(field, few if quick else places, budget)
    return rows + measure_envs(quick, ROUNDS, budget)


def _axis(field: str, places: Sequence[int], budget: float) -> list[dict[str, Any]]:
    """A training step of every form at each place of an axis, the rest as in ``BASE``."""
    cases = {place: Case(**BASE._asdict() | {field: place}) for place in places}
    steps = {place: _steps(case) for place, case in cases.items()}
    times = along(steps, ROUNDS, budget=budget)
    peaks = {x: {form: peak_bytes(step, device()) / 2**20 for form, step in here.items()} for x, here in steps.items()}
    called = AXES[field][0]
    rows = _rows(called, times, peaks)
    base = ", ".join(f"{name} {getattr(BASE, key):,}" for key, (name, _, _) in AXES.items() if key != field)
    title = f"A training step against {called} ({LAYERS} layers, {WIDTH} wide; {base})"
    forms = times[places[0]]
    panels = {
        "ms a step": {form: _curve(form, times, lambda taken: median(1000 * t for t in taken)) for form in forms},
        "MB at the worst moment of a step": {form: _curve(form, peaks) for form in forms},
    }
    rows[-1]["figure"] = described(f"scaling_{called.replace(' ', '_')}", title, called, panels)
    return rows


def _rows(
    called: str, times: dict[int, dict[str, list[float]]], peaks: dict[int, dict[str, float]]
) -> list[dict[str, Any]]:
    """Both ends of the curves as ratios, and how steep the one of CQL is."""
    near, far = min(times), max(times)
    pairs = [(near, ON, PLAIN), *((far, form, PLAIN) for form in times[far] if form.startswith("ILQL"))]
    pairs += [(far, NAIVE, ON)] if NAIVE in times[far] else []
    rows = [row(f"{called} {x:,}: {a} / {b}, time", ratio(times[x], a, b), "x") for x, a, b in pairs]
    rows += [
        row(f"{called} {x:,}: {a} / {b}, peak memory", peaks[x][a] / peaks[x][b], "x")
        for x, a, b in pairs
        if ON in (a, b) and x == far
    ]
    steepness = growth(_curve(ON, times, median))
    return [*rows, row(f"{called} to {far:,}: power with which the time of {ON} grows", steepness, "")]


def _curve(form: str, found: dict[int, dict[str, Any]], of: Callable[[Any], float] = float) -> dict[int, float]:
    """A form's curve; places where it was left out are missing."""
    return {x: of(here[form]) for x, here in found.items() if form in here}


def growth(points: dict[int, float]) -> float:
    """Power with which a quantity grows: the slope through its last three points, both axes logarithmic."""
    logs = torch.tensor(sorted(points.items())[-3:], dtype=torch.float64).log()
    x, y = (logs - logs.mean(0)).unbind(1)
    return float((x * y).sum() / x.square().sum())


def _steps(case: Case) -> dict[str, Callable[[], None]]:
    """A step of each form of the loss, over one model and batch. The naive form is left out where it does not fit."""
    model = make_model(case)
    forms: dict[str, nn.Module] = {OFF: make_loss(model, cql_weight=0.0), ON: make_loss(model)}
    if TABLES * 4 * case.rows * case.length * case.vocabulary < _free_memory():
        forms[NAIVE] = NaiveILQL(*model).to(device())
    batch = make_batch(case, case.rows)
    return cleared_steps(model.lm, forms, batch, PLAIN)


def _free_memory() -> float:
    """Bytes; infinity where the system does not report it."""
    if device().type == "cuda":
        return torch.cuda.mem_get_info(device())[0]
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return math.inf
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
