"""Scaling curves: their steepness by hand, what they hold, and steps that run on whatever device they are given."""

import pytest
import torch

from benchmarks import scaling
from benchmarks.common import using


@pytest.fixture(autouse=True)
def on_the_cpu():
    with using(torch.device("cpu")):
        yield


@pytest.mark.parametrize(
    ("points", "power"),
    [
        ({1: 7.0, 10: 3.0, 20: 12.0, 40: 48.0}, 2),  # only the last three count
        ({40: 8.0, 10: 2.0, 20: 4.0}, 1),  # in any order
        ({64: 5.0, 256: 5.0}, 0),
        ({1: 1.0, 4: 2.0}, 0.5),
    ],
)
def test_growth_by_hand(points, power):
    assert scaling.growth(points) == pytest.approx(power, abs=1e-9)


def test_an_axis_gives_ratios_at_its_ends_and_a_figure_with_all_of_its_points(monkeypatch):
    monkeypatch.setattr(scaling, "BASE", scaling.BASE._replace(rows=8, length=32))
    rows = {entry["name"]: entry for entry in scaling._axis("vocabulary", (32, 4096), budget=0.0)}
    assert {name.split(":")[0] for name in rows} == {"vocabulary 32", "vocabulary 4,096", "vocabulary to 4,096"}
    assert all(entry["value"] > 0 or "power" in name for name, entry in rows.items())
    (figure,) = [entry["figure"] for entry in rows.values() if "figure" in entry]
    assert figure["name"] == "scaling_vocabulary"
    for panel in figure["panels"]:
        assert {tuple(points["x"]) for points in panel["curves"].values()} == {(32, 4096)}
        assert len(panel["curves"]) == 4
    # At 4,096 words tables of all values weigh most, and only the naive form builds them.
    assert rows["vocabulary 4,096: naive ILQL, CQL on / ILQL, CQL on, peak memory"]["value"] > 1.5
