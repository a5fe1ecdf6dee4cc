"""Pictures of curves: plain data in, small files out, names that do not cover each other."""

import json

import pytest

from benchmarks.common import Median
from benchmarks.figures import apart, described, draw

CURVES = {
    "plain": {32: Median(1.0, 0.9, 1.2), 4096: Median(10.0, 9.0, 11.0)},
    "stops early": {32: 2.0},
    "same end": {32: 3.0, 4096: 10.0},
}


def test_a_figure_is_plain_data_and_its_picture_a_small_png_of_its_name(tmp_path):
    figure = described("name", "Title", "vocabulary", {"ms": CURVES, "MB": CURVES})
    assert json.loads(json.dumps(figure)) == figure
    curves = figure["panels"][0]["curves"]
    assert curves["plain"] == {"x": [32, 4096], "y": [1, 10], "low": [0.9, 9], "high": [1.2, 11]}
    assert curves["stops early"] == {"x": [32], "y": [2]}
    pytest.importorskip("matplotlib")
    path = draw(figure, tmp_path / "new")
    assert path == tmp_path / "new" / "name.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 60_000


def test_names_keep_apart_and_in_order():
    assert apart([0.9, 0.1, 0.5], 0.1) == [0.9, 0.1, 0.5]
    assert apart([0.5, 0.5, 0.1], 0.2) == pytest.approx([0.4, 0.6, 0.1])  # nobody is pushed further than others
