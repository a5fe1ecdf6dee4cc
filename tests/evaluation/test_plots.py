import math
import sys

import pytest

from torchrl_lang.evaluation import Summary
from torchrl_lang.evaluation.plots import draw_run, new_figure, plot_guess_histogram

pytest.importorskip("matplotlib")

RUN = {"step": [0, 10, 20], "loss": [math.nan, 1.0, 0.5], "return": [-4.0, math.nan, -2.0], "return_error": [0.5] * 3}


def test_a_run_with_a_band_of_one_standard_error():
    axes = new_figure(width=1, height=1).add_subplot()
    draw_run(axes, "ours", RUN, "step", "return")
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (-4.5, -1.5)  # of 0.5 around -4 and -2


def test_histogram(tmp_path):
    players = [Summary("a", 10, -1.0, 0, 0.9, 0.1, 2.0, {2: 4, 5: 5}, 1), Summary("b", 5, -6.0, 0.1, 0, 0, 6.0, {}, 5)]
    data = plot_guess_histogram(tmp_path / "new" / "guesses.png", players, title="Wordle").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"torchrl-lang\[plots\]"):
        new_figure(width=1, height=1)
