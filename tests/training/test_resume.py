from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.processes import Program
from tests.training import resumable
from torchrl_lang.evaluation import read_columns

STEPS = 200


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_any_moment_and_resumed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    resumable.main(whole, STEPS)
    run, moment = Program(resumable.__file__, killed, STEPS), random.Random()
    least, log = moment.randint(20, 50), killed / "log.csv"
    while not log.exists() or log.read_bytes().count(b"\n") < least:
        assert run.returncode is None, "the run ended before it could be killed"
        time.sleep(0.0005)
    time.sleep(moment.random() * 0.01)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    resumable.main(killed, STEPS)
    # Bit for bit: parameters, and every figure that was logged, each once.
    assert (killed / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
    assert (killed / "log.csv").read_text() == (whole / "log.csv").read_text()
    assert read_columns(whole / "log.csv")["step"][-1] == STEPS
