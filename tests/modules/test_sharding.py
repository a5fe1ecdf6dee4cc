"""A model sharded by fully_shard (FSDP2) over two processes trains and acts as a whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_two_processes_that_share_a_model(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "RL_WARNINGS": "False"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.modules.sharding_worker"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=root, env=environment, **pipes)
        for rank in range(2)
    ]
    said = []
    try:
        for worker in workers:
            said.append(worker.communicate(timeout=240)[0])
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
