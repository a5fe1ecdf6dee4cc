"""Batches of Wordle games, the rows that the benchmarks of a training step learn from."""

from __future__ import annotations

import tempfile

from tensordict import TensorDictBase

from benchmarks.common import smoking
from torchrl_lang.data import generate_dataset, row_buffer
from torchrl_lang.envs.wordle.task import WordleTask

VOCABULARY, PAD, MAX_LENGTH = 35, 29, 74


def wordle_batches(count: int = 8, rows: int = 64, *, games: int = 2000) -> list[TensorDictBase]:
    """Batches of the demo's data, each trimmed to its longest row; the same ones every time, few in a smoke run."""
    if smoking():
        count, rows, games = 2, 8, 64
    task = WordleTask.of("100", "official")
    with tempfile.TemporaryDirectory() as folder:
        player = task.player("mediocre", 0).policy
        dataset = generate_dataset(task.env(1024), player, f"{folder}/data", episodes=games, seed=0, progress=False)
        buffer = row_buffer(dataset[:], rows, seed=0, drop_last=True)
        return [buffer.sample() for _ in range(count)]
