"""Algorithm distillation: steps a second of the tabular source algorithms, all tasks and streams in one batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import interleaved, median, one_core, row
from torchrl_lang.algorithm_distillation.sources import UCB, NoisyExpert, PosteriorSampling, QLearning, TabularSource
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkRoomEnv, random_bandits

ROOM, STREAMS = 9, 100
ARMS, BANDITS = 10, 1000
STEPS = 200
SMOKE = {"STREAMS": 2, "BANDITS": 20, "STEPS": 10}
MIN_STEPS_PER_SECOND = 1_000_000
"""On two cores, each with a process of its own: one has half of it."""


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    goals = torch.arange(ROOM**2)[:, None]
    room = DarkRoomEnv(ROOM, task=goals, batch_size=[ROOM**2, STREAMS], seed=0)
    arms = torch.arange(BANDITS)[:, None]
    bandits = BernoulliBanditEnv(random_bandits(BANDITS, ARMS), task=arms, batch_size=[BANDITS, 8], seed=0)
    sources: dict[str, TabularSource] = {
        "Q-learning": QLearning(room, STEPS, seed=0),
        "UCB": UCB(bandits, STEPS, seed=0),
        "an expert with decaying noise": NoisyExpert(room, STEPS, seed=0),
        "posterior sampling": PosteriorSampling(room, STEPS, seed=0),
    }
    jobs: dict[str, Callable[[], Any]] = {name: partial(_run, source) for name, source in sources.items()}
    times = interleaved(jobs, 3 if quick else 9)
    rows = []
    for name, source in sources.items():
        rate = median(source.env.batch_size.numel() * STEPS / taken for taken in times[name])
        target = MIN_STEPS_PER_SECOND / 2 if name != "posterior sampling" else None
        rows.append(row(f"source algorithms: {name}", rate, "steps/s", target))
    return rows


def _run(source: TabularSource) -> None:
    for _ in source.blocks():
        pass
