"""Algorithm distillation: acting with a cached rolling context, or reading it all each step; training and sampling.

Acting is timed for one episode of 20 steps of a full context of 160: the oldest episode is evicted and the rest is read
again, once, then 20 steps follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import interleaved, median, one_core, ratio, row
from torchrl_lang.algorithm_distillation import ADLoss, ADTransformer, HistoryActor, HistoryWindows, LearningHistory
from torchrl_lang.algorithm_distillation.sources import NoisyExpert
from torchrl_lang.envs.grids import DarkRoomEnv
from torchrl_lang.training import adamw, total_loss

STREAMS, CONTEXT, EPISODE, ROOM = 96, 160, 20, 9
WINDOWS, WINDOW = 64, 120
MIN_RATIO = 3.0
MOST_SAMPLING = 0.05
SMOKE = {"STREAMS": 2, "CONTEXT": 40, "WINDOWS": 4, "WINDOW": 20}
CACHES = {"acting, cached": True, "acting, reading the whole context": False}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    env = DarkRoomEnv(ROOM, task=torch.arange(STREAMS) % ROOM**2, batch_size=[STREAMS], episode_length=EPISODE)
    model = ADTransformer.for_env(env, context=CONTEXT)
    jobs = {name: _episode(HistoryActor(model, cache=cache, seed=0)) for name, cache in CACHES.items()}
    repeats = 3 if quick else 9
    times = interleaved(jobs, repeats)
    rows = [row(name, median(STREAMS * EPISODE / taken for taken in times[name]), "steps/s") for name in CACHES]
    saved = row("reading the whole context / cached, time", ratio(times, *reversed(CACHES)), "x", MIN_RATIO)
    work = _training(env)
    taken = interleaved(work, repeats)
    learned = median(1000 * each for each in taken["step"])
    rows += [saved, row(f"a training step of {WINDOWS} x {WINDOW} steps", learned, "ms")]
    rows.append(
        row("sampling its windows / the step, time", ratio(taken, "sample", "step"), "x", MOST_SAMPLING, at_most=True)
    )
    return [{**entry, "name": f"algorithm distillation: {entry['name']}"} for entry in rows]


def _episode(actor: HistoryActor) -> Callable[[], None]:
    """A job that acts for one episode; the context is full before the first one."""
    random = torch.Generator().manual_seed(0)
    actor.begin(STREAMS)

    def job() -> None:
        for step in range(EPISODE):
            actor.act(torch.randint(ROOM, (STREAMS, 2), generator=random))
            done = torch.full((STREAMS,), step == EPISODE - 1)
            actor.observe(torch.randint(2, (STREAMS,), generator=random).float(), done)

    for _ in range(CONTEXT // EPISODE):
        job()
    return job


def _training(env: DarkRoomEnv) -> dict[str, Callable[[], Any]]:
    """A training step on windows, and sampling them."""
    goals = torch.arange(ROOM**2)[:, None]
    source = NoisyExpert(DarkRoomEnv(ROOM, task=goals, batch_size=[ROOM**2, 4]), 2 * WINDOW)
    windows = HistoryWindows(LearningHistory(source.history(), source.tasks), WINDOW).buffer(WINDOWS)
    loss = ADLoss(ADTransformer.for_env(env, context=WINDOW))
    optimizer, batch = adamw(loss, 1e-3), windows.sample()

    def job() -> None:
        optimizer.zero_grad()
        total_loss(loss(batch)).backward()
        optimizer.step()

    return {"step": job, "sample": windows.sample}
