"""A training step in one process and, by torchrun, in two: ``python -m benchmarks.two_processes``.

The model has 20 million parameters, each process one thread, and the batch is the same. Two cores must be idle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median as middle
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.common import RESULTS, median, record, row, table
from torchrl_lang import _ranks
from torchrl_lang.data import row_buffer
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.training import adamw, train_steps

ROWS, LENGTH, STEPS, REPEATS, MIN_SPEED_UP = 16, 128, 8, 3, 1.6


def run() -> list[dict[str, Any]]:
    taken: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(REPEATS):
        for processes, seconds in taken.items():
            seconds.append(measured_seconds(processes))
    speed_up = median(one / two for one, two in zip(taken[1], taken[2], strict=True))
    return [
        row("BC, 20 M parameters: two processes over one, speed", speed_up, "x", MIN_SPEED_UP),
        row("BC, 20 M parameters: a step in one process", median(taken[1]), "s"),
        row("BC, 20 M parameters: a step in two processes", median(taken[2]), "s"),
    ]


def measured_seconds(processes: int) -> float:
    """Seconds of a step in that many processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*torchrun, "-m", "benchmarks.two_processes", "step"]
    found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stderr)
    return float(found.stdout)


def step() -> None:
    """Train for some steps in this process of torchrun; the first one prints the seconds of a step, the median."""
    with _ranks.joined(torch.device("cpu")):
        torch.manual_seed(0)
        lm = causal_lm("gpt2", vocab_size=512, layers=6, width=512, heads=8, max_length=LENGTH)
        loss, real = BCLoss(language_actor(lm)), torch.ones(32 * ROWS, LENGTH, dtype=torch.bool)
        rows = TensorDict(
            tokens=torch.randint(512, real.shape),
            attention_mask=real,
            agent_mask=real & (torch.arange(LENGTH) >= LENGTH // 2),
            token_reward=torch.zeros(real.shape),
            terminated=real[:, :1],
            batch_size=[len(real)],
        )
        buffer = row_buffer(rows, ROWS, share=(_ranks.rank(), _ranks.size()))
        times, began = [], time.perf_counter()
        for _ in train_steps(loss, buffer.sample, adamw(loss, 1e-4), steps=STEPS + 1, max_grad_norm=1.0):
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        if _ranks.is_first():
            print(middle(times[1:]))


def main() -> None:
    if sys.argv[1:] == ["step"]:
        step()
        return
    rows = run()
    before = record(rows, RESULTS / "two_processes.json")
    print(table(rows, before))


if __name__ == "__main__":
    main()
