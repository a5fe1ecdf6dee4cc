"""Gradients of several processes are averaged when the loss is called through its DistributedDataParallel wrapper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.objectives.conftest import make_ilql, make_rows, total

pytestmark = pytest.mark.slow


def test_two_processes_average_their_gradients(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "RL_WARNINGS": "False"}
    command = [sys.executable, "-m", "tests.objectives.ddp_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(tmp_path / "grads")], cwd=root, env=environment
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    loss = make_ilql(reduction="sum")
    total(loss(make_rows())).backward()
    found = load_file(tmp_path / "grads")
    expected = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad / 2, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
