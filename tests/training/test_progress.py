from __future__ import annotations

import io

import pytest
import torch

from torchrl_lang.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    shown = ("loss", "other", "return")
    with Progress(4, label="train", start=1, stream=stream, every=0, shown=shown) as progress:
        progress.update(2, {"loss": torch.tensor(0.123456), "other": 1})
        progress.update(3, {"return": -2.5, "hidden": 1.0})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train: 1/4 step"
    assert lines[1].startswith("train: 2/4 step, 50 %, ")
    assert lines[1].endswith("left, loss 0.1235, other 1")
    assert lines[-1].endswith("loss 0.1235, other 1, return -2.5")  # a figure stays on show
    with Progress(9, stream=(stream := io.StringIO()), every=3600) as progress:
        for step in range(9):
            progress.update(step + 1, {"loss": step})
    assert len(stream.getvalue().splitlines()) == 2


def test_a_bar_in_a_terminal():
    stream = Terminal()
    with Progress(4, label="train", unit="game", stream=stream) as progress:
        for done in range(1, 5):
            progress.update(done, {"loss": 0.5})
    assert "train" in stream.getvalue()
    assert "4/4" in stream.getvalue()
    assert "loss 0.5" in stream.getvalue()
    with pytest.raises(RuntimeError), Progress(4, stream=stream) as progress:
        raise RuntimeError
    assert progress._bar.disable  # closed when the run fails
