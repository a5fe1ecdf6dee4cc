from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.processes import Program
from torchrl_lang.evaluation import read_columns

SCRIPT = Path(__file__).with_name("resumable.py")
STEPS = 400


def start(folder: Path) -> Program:
    folder.mkdir(exist_ok=True)
    return Program(SCRIPT, folder, STEPS)


def finish(folder: Path) -> None:
    assert start(folder).wait() == 0


def rows_logged(folder: Path) -> int:
    log = folder / "log.csv"
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_any_moment_and_resumed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole)
    moment = random.Random()
    for least in (2, moment.randint(40, 90)):  # the first before there is a checkpoint, or just about
        run = start(killed)
        while rows_logged(killed) < least:
            assert run.returncode is None, "the run ended before it could be killed"
            time.sleep(0.0005)
        time.sleep(moment.random() * 0.01)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    finish(killed)
    # Bit for bit: parameters, and every figure that was logged, each once.
    assert (killed / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
    assert (killed / "log.csv").read_text() == (whole / "log.csv").read_text()
    assert read_columns(whole / "log.csv")["step"][-1] == STEPS
