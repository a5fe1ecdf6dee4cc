from __future__ import annotations

import math
import struct
import sys

import pytest

from torchrl_lang.evaluation import Summary, plot_guess_histogram, plot_learning_curves
from torchrl_lang.evaluation.plots import draw_run, new_figure

pytest.importorskip("matplotlib")

RUN = {"step": [0, 10, 20], "loss": [math.nan, 1.0, 0.5], "return": [-4.0, math.nan, -2.0], "return_error": [0.5] * 3}


def png(path) -> tuple[int, int]:
    """Width and height of a PNG with a drawing."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
    return struct.unpack(">II", data[16:24])


def test_curves_from_records_and_from_a_file(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("step,loss,return,return_error\n0,,-4.0,0.5\n10,1.0,,\n20,0.5,-2.0,0.25\n")
    path = plot_learning_curves(
        tmp_path / "new" / "curves.png", {"ours": RUN, "file": log}, references={"data": -3.0}, title="Wordle"
    )
    width, height = png(path)
    assert width > 2 * height  # two panels
    one = plot_learning_curves(tmp_path / "one.png", {"ours": RUN}, panels=["return", "nothing"])
    assert png(one)[0] < width
    axes = new_figure(width=1, height=1).add_subplot()
    draw_run(axes, "ours", RUN, "step", "return")
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (-4.5, -1.5)  # one standard error of 0.5 around -4 and -2
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    with pytest.raises(ValueError, match="'nothing'"):
        plot_learning_curves(tmp_path / "x.png", {"ours": RUN}, panels=["nothing"])


def test_histogram(tmp_path):
    players = [
        Summary("a", 10, -1.0, 0.1, 0.9, 0.1, 2.0, {2: 4, 5: 5}, 1),
        Summary("b", 5, -6.0, 0.1, 0, 0, 6.0, {}, 5),
    ]
    assert png(plot_guess_histogram(tmp_path / "guesses.png", players))


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"torchrl-lang\[plots\]"):
        plot_learning_curves(tmp_path / "x.png", {"ours": RUN})
