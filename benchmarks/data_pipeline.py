"""Data on one core: games made a second, rows read a second, what prefetching is worth, a large set against a small."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from benchmarks.common import interleaved, one_core, ratio
from benchmarks.common import row as _row
from torchrl_lang.data import DatasetWriter, RowDataset, generate_dataset, load_dataset, row_buffer
from torchrl_lang.envs.wordle.task import WordleTask

BATCH, BATCHES = 256, 40
QUICK = {"games": 10_000, "copies": 10, "repeats": 5}
SMOKE = {"BATCH": 32, "BATCHES": 4, "QUICK": {"games": 200, "copies": 2, "repeats": 1}}
MAX_MINUTES_A_MILLION, MIN_LARGE_TO_SMALL = 5.0, 0.95


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        rows = _run(home, **QUICK if quick else {"games": 60_000, "copies": 40, "repeats": 15})
    return [{**entry, "name": f"data: {entry['name']}"} for entry in rows]


def _run(home: str, games: int, copies: int, repeats: int) -> list[dict[str, Any]]:
    task = WordleTask.of("100", "official")
    env, player = task.env(2048), task.player("mediocre", 0).policy
    start = time.perf_counter()
    small = generate_dataset(env, player, f"{home}/small", episodes=games, seed=0, progress=False)
    minutes = (time.perf_counter() - start) / games * 1e6 / 60
    start = time.perf_counter()
    with DatasetWriter(f"{home}/large", env.tokenizer, env.row_length) as writer:
        block = small[:10_000]
        for _ in range(copies):
            writer.extend(block)
    written = copies * block.shape[0] / (time.perf_counter() - start)
    large = load_dataset(f"{home}/large")
    size = f"{large.rows.bytes() / 1e6:,.0f} MB"
    rows = [
        _row("a million games of the mediocre mixture, 100 words", minutes, "min", MAX_MINUTES_A_MILLION, at_most=True),
        _row("writing rows, with checks and checksums", written, "rows/s"),
    ]
    jobs: dict[str, Iterator[TensorDictBase]] = {
        "indexing": _indexed(large),
        "row_buffer": _sampled(large),
        "row_buffer, bucket=True": _sampled(large, bucket=True),
        "row_buffer, bucket=True, prefetch=1": _sampled(large, bucket=True, prefetch=1),
    }
    times = interleaved({name: _reading(batches) for name, batches in jobs.items()}, repeats)
    for name, seconds in times.items():
        rows.append(_row(f"{name}, {size}", BATCHES * BATCH / statistics.median(seconds), "rows/s"))
    rows += _large_against_small(small, large, size, repeats)
    rows += _padding(large)
    return rows + _prefetch(large, repeats)


def _indexed(data: RowDataset) -> Iterator[TensorDictBase]:
    """Uniform rows, nothing trimmed: the floor."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield data[torch.randint(len(data), (BATCH,), generator=generator)]


def _sampled(data: RowDataset, **options: Any) -> Iterator[TensorDictBase]:
    buffer = row_buffer(data, BATCH, **options)
    while True:
        yield buffer.sample()


def _reading(batches: Iterator[TensorDictBase]) -> Callable[[], None]:
    def job() -> None:
        for _ in range(BATCHES):
            next(batches)

    return job


def _large_against_small(small: RowDataset, large: RowDataset, size: str, repeats: int) -> list[dict[str, Any]]:
    head = load_dataset(small.folder).rows[:5_000].clone()  # in memory, a few MB
    jobs = {"large": _sampled(large, bucket=True), "small": _sampled_rows(head)}
    reading = interleaved({name: _reading(batches) for name, batches in jobs.items()}, repeats)
    training = interleaved({name: _training(batches) for name, batches in jobs.items()}, repeats)
    over = f"from disk, {size}, over those from {head.bytes() / 1e6:.0f} MB in memory"
    return [
        _row(f"bucketed rows/s {over}", ratio(reading, "small", "large"), "x"),
        _row(
            f"steps/s, ten milliseconds of work each, {over}",
            ratio(training, "small", "large"),
            "x",
            MIN_LARGE_TO_SMALL,
        ),
    ]


def _training(batches: Iterator[TensorDictBase]) -> Callable[[], None]:
    """Batches beside a step of work that takes about ten milliseconds."""
    matrix = torch.randn(512, 512)

    def job() -> None:
        for _ in range(BATCHES // 4):
            next(batches)
            for _ in range(8):
                matrix @ matrix

    return job


def _sampled_rows(rows: TensorDictBase) -> Iterator[TensorDictBase]:
    buffer = row_buffer(rows, BATCH, bucket=True)
    while True:
        yield buffer.sample()


def _padding(data: RowDataset) -> list[dict[str, Any]]:
    """The share of a batch's tokens that are padding."""
    shares = []
    for options in ({"trim": False}, {}, {"bucket": True}):
        batches = _sampled(data, **options)
        real = torch.cat([next(batches)["attention_mask"].float().mean()[None] for _ in range(BATCHES)])
        shares.append(1 - float(real.mean()))
    names = ("untrimmed", "trimmed", "trimmed, bucket=True")
    return [_row(f"padding in a batch, {name}", share, "") for name, share in zip(names, shares, strict=True)]


def _prefetch(data: RowDataset, repeats: int) -> list[dict[str, Any]]:
    """Is the next batch ready by the time that a step of work is done?"""
    jobs = {"plain": _sampled(data, bucket=True), "ahead": _sampled(data, bucket=True, prefetch=1)}
    times = interleaved({name: _training(batches) for name, batches in jobs.items()}, repeats)
    note = "the thread that reads ahead wants a core of its own; where other programs have it, nothing is gained"
    return [_row("steps/s with prefetch=1 over without", ratio(times, "plain", "ahead"), "x", note=note)]
