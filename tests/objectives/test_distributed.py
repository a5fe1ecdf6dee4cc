"""Gradients of several processes are averaged when the loss is called through its DistributedDataParallel wrapper."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.objectives.conftest import make_ilql, make_rows, total
from tests.processes import Program

pytestmark = pytest.mark.slow


def test_two_processes_average_their_gradients(tmp_path):
    files = [tmp_path / "store", tmp_path / "grads"]
    workers = [Program("-m", "tests.objectives.ddp_worker", rank, *files) for rank in range(2)]
    try:
        assert [worker.wait() for worker in workers] == [0, 0], workers[0].stderr
    finally:
        for worker in workers:
            worker.kill()
    loss = make_ilql(reduction="sum")
    total(loss(make_rows())).backward()
    found = load_file(tmp_path / "grads")
    expected = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            found[name], grad / 2, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
