"""Specifications, and games that are built once, whole, and safely side by side."""

import time

import pytest

from tests.engines import forked
from torchrl_lang.envs.textworld import TextWorldSpec, build_games
from torchrl_lang.envs.textworld.engine import EngineProcess

from .conftest import SPECS, engines

pytest.importorskip("textworld", reason="the extra 'textworld' is not installed")


def test_what_is_there_is_not_built_again(games):
    before = {path: path.stat().st_mtime_ns for path in games.values()}
    start = time.monotonic()
    again = build_games(list(SPECS.values()), games["coin"].parent)
    assert time.monotonic() - start < 0.5
    assert again == list(games.values())
    assert {path: path.stat().st_mtime_ns for path in again} == before
    assert engines() == []


def test_a_game_that_cannot_be_built_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)not build TextWorldSpec\('coin_collector', seed=0, level=0\).*1-300"):
        build_games([TextWorldSpec("coin_collector", level=0)], tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert engines() == []


def test_two_build_one_game_in_one_folder_after_one_that_was_killed(games, tmp_path):
    """Where the game can be seen it is whole; nothing half-built is left for those who come later."""
    spec = SPECS["coin"]
    path = tmp_path / f"{spec.name}.z8"
    job = {"path": str(path), "kind": spec.kind, "seed": spec.seed, "options": dict(spec.options)}
    with forked():
        killed, *both = (EngineProcess() for _ in range(3))
    killed.ask([job])
    until = time.monotonic() + 60
    while not list(tmp_path.glob(".building-*/*.ni")) and time.monotonic() < until:
        time.sleep(0.005)
    killed.end()
    assert list(tmp_path.glob(".building-*"))
    assert not path.exists()
    for process in both:
        process.ask([job])
    told = [process.answers(60.0)[0] for process in both]
    for process in both:
        process.end()
    assert sorted(each["built"] for each in told) == [False, True]
    assert build_games([spec, spec], tmp_path) == [path] * 2
    assert path.with_suffix(".json").exists()
    assert not list(tmp_path.glob(".building-*"))
    assert engines() == []
    assert path.read_bytes() == games["coin"].read_bytes()  # the same specification gives the same file
