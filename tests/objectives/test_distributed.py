"""Gradients of several processes are averaged when the loss is called through its DistributedDataParallel wrapper."""

from __future__ import annotations

import pytest

from tests import processes

pytestmark = pytest.mark.slow


def test_two_processes_average_the_gradients_of_every_loss():
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = processes.run("-m", *torchrun, "-m", "tests.objectives.ddp_worker", timeout=240)
    assert done.returncode == 0, done.stderr
