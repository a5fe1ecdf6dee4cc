"""A model sharded by fully_shard (FSDP2) over two processes trains and acts as a whole one."""

from __future__ import annotations

import pytest

from tests.processes import Program

pytestmark = pytest.mark.slow


def test_two_processes_that_share_a_model(tmp_path):
    workers = [Program("-m", "tests.modules.sharding_worker", rank, tmp_path / "store") for rank in range(2)]
    try:
        assert [worker.wait(240) for worker in workers] == [0, 0], "\n".join(worker.stderr for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
