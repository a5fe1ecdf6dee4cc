"""Pictures of curves: plain data in, small files out, names that do not cover each other."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from benchmarks.common import Median
from benchmarks.figures import apart, described, draw

CURVES = {
    "plain": {32: Median(1.0, 0.9, 1.2), 4096: Median(10.0, 9.0, 11.0)},
    "stops early": {32: 2.0},
    "same end": {32: 3.0, 4096: 10.0},
}


def test_a_figure_is_plain_data_with_the_spread_of_medians():
    figure = described("name", "Title", "vocabulary", {"ms": CURVES})
    assert json.loads(json.dumps(figure)) == figure
    curves = figure["panels"][0]["curves"]
    assert curves["plain"] == {"x": [32, 4096], "y": [1, 10], "low": [0.9, 9], "high": [1.2, 11]}
    assert curves["stops early"] == {"x": [32], "y": [2]}


def test_a_picture_is_a_small_png_of_its_name(tmp_path):
    pytest.importorskip("matplotlib")
    path = draw(described("name", "Title", "vocabulary", {"ms": CURVES, "MB": CURVES}), tmp_path / "new")
    assert path == tmp_path / "new" / "name.png"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert 5_000 < len(content) < 60_000


@pytest.mark.parametrize("seed", range(4))
def test_names_keep_apart_and_in_order(seed):
    draws = random.Random(seed)
    wanted = [draws.random() for _ in range(draws.randint(1, 8))]
    places = apart(wanted, 0.1)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for lower, upper in itertools.pairwise(order):
        assert places[upper] - places[lower] >= 0.1 - 1e-6
    if all(wanted[b] - wanted[a] >= 0.1 for a, b in itertools.pairwise(order)):
        assert places == wanted
    assert sum(places) == pytest.approx(sum(wanted))  # nobody is pushed further than others
