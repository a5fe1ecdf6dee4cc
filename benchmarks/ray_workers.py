"""Games that wait, with one worker of a Ray cluster and with two: ``python -m benchmarks.ray_workers``.

Each worker has one corridor, whose steps take 20 ms for which no processor is needed.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import Any

import ray
import torch

from benchmarks.common import RESULTS, median, record, row, table
from torchrl_lang.data import EpisodeRows
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
from torchrl_lang.recipes.ray_collector import RayWorkers

WAIT, TURNS, BATCHES, REPEATS, MIN_SPEED_UP = 0.02, 50, 4, 7, 1.8
LENGTH = 4


class WaitingCorridor(CorridorEnv):
    """Each step waits, as a game on a server does."""

    def _step(self, tensordict: Any) -> Any:
        time.sleep(WAIT)
        return super()._step(tensordict)


def make_env(*, seed: int, device: torch.device) -> WaitingCorridor:
    return WaitingCorridor(LENGTH, batch_size=[1], seed=seed, device=device)


def run() -> list[dict[str, Any]]:
    player = CorridorPlayer(make_env(seed=0, device=torch.device("cpu")).tokenizer, LENGTH)
    options: dict[str, Any] = {"games": 1, "turns": TURNS, "seed": 0, "device": torch.device("cpu")}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    workers = {n: RayWorkers(make_env, player, rows=EpisodeRows(), workers=n, **options) for n in (1, 2)}
    taken: dict[int, list[float]] = {n: [] for n in workers}
    for _ in range(REPEATS):
        for n, collector in workers.items():
            taken[n].append(measured_rate(collector, n))
    ray.shutdown()
    speed_up = median(two / one for one, two in zip(taken[1], taken[2], strict=True))
    what = "a game that waits 20 ms a step:"
    return [
        row(f"{what} two Ray workers over one, speed", speed_up, "x", MIN_SPEED_UP),
        row(f"{what} one worker", median(taken[1]), "steps/s"),
        row(f"{what} two workers", median(taken[2]), "steps/s"),
    ]


def measured_rate(collector: RayWorkers, workers: int) -> float:
    """Steps a second, after the turns that each worker may have played before."""
    for _ in islice(collector, workers):
        pass
    began = time.perf_counter()
    for _ in islice(collector, workers * BATCHES):
        pass
    return workers * BATCHES * TURNS / (time.perf_counter() - began)


def main() -> None:
    rows = run()
    before = record(rows, RESULTS / "ray_workers.json")
    print(table(rows, before))


if __name__ == "__main__":
    # Workers import this file, which they cannot by the name of the program.
    from benchmarks.ray_workers import main as started

    started()
