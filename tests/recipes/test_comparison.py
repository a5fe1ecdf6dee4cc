"""What comparisons of methods share: options that results go together with, and players that do nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.interrupt import interrupted_at
from torchrl_lang._files import FileError, Record
from torchrl_lang.recipes.compare import TrainedPlayer, decodings
from torchrl_lang.recipes.demo_options import ComparisonOptions
from torchrl_lang.recipes.load_run import load_run


class Numbers(Record):
    numbers: tuple[int, ...]


class Counter(TrainedPlayer[Numbers]):
    """Its policies are numbers; it remembers what it was asked for."""

    games, remedy = Numbers, "delete it: the numbers are counted again"
    asked: list[str] = []  # of all instances

    def ways(self):
        self.asked.append("ways")
        yield from (("greedy, beta 1", 1), ("sampled at 0.5", 2))

    def measure(self, policy):
        self.asked.append(f"measure {policy}")
        return {"value": 10 * policy}

    def play(self, policy):
        self.asked.append(f"play {policy}")
        return Numbers(numbers=(policy, policy))


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(Counter, "asked", [])
    return Counter.asked


def test_a_player_measures_and_plays_once(tmp_path, asked, capsys):
    for player in (Counter(tmp_path, "bc"), Counter(tmp_path, "bc")):
        for _ in range(2):
            assert player.measured == {"greedy, beta 1": {"value": 10}, "sampled at 0.5": {"value": 20}}
            assert player.test("greedy, beta 1").numbers == (1, 1)
        assert asked == ["ways", "measure 1", "measure 2", "play 1"]
    assert json.loads((tmp_path / "test" / "greedy_beta_1.json").read_text())["numbers"] == [1, 1]
    assert Counter(tmp_path, "bc").test("sampled at 0.5").numbers == (2, 2)
    assert asked[4:] == ["ways", "play 2"]
    names = {path.name for path in tmp_path.rglob("*.json")}
    assert names == {"choice.json", "greedy_beta_1.json", "sampled_at_0.5.json"}
    assert (
        capsys.readouterr().out == f"played {tmp_path.name}: greedy, beta 1\nplayed {tmp_path.name}: sampled at 0.5\n"
    )


def test_games_that_were_cut_off_are_played_again(tmp_path, asked, capsys):
    with interrupted_at(Numbers, "write", 1), pytest.raises(KeyboardInterrupt):
        Counter(tmp_path, "bc").test("greedy, beta 1")
    assert (asked, capsys.readouterr().out) == (["ways", "play 1"], "")
    assert Counter(tmp_path, "bc").test("greedy, beta 1").numbers == (1, 1)


def test_each_kind_of_run_is_decoded_in_its_own_ways(walks):
    names = ("bc", "oreo", "dt", "ilql", "psi", "qsft", "chai", "utterance-ilql")
    ways = {name: [way for way, _ in decodings(load_run(walks / name), temperatures=(0.5,))] for name in names}
    assert ways["bc"] == ways["oreo"] == ["greedy", "sampled at 0.5"]
    assert ways["ilql"] == [f"greedy, beta {beta}" for beta in (1, 2, 4, 8, 16)]
    assert ways["psi"] == ["greedy, beta 1"]
    assert ways["qsft"] == [f"greedy, beta {beta}" for beta in (4, 8, 16, 32, 64)]
    assert ways["chai"] == ways["utterance-ilql"] == ["best of 4", "best of 8", "best of 16"]
    assert len(ways["dt"]) in (2, 4)
    assert all(", return -" in way for way in ways["dt"])
    run = load_run(walks / "ilql")
    assert [way for way, _ in decodings(run, by_values=False, temperatures=(1.0,))] == ["greedy", "sampled at 1"]
    guided = dict(decodings(run, betas=(3.0,), guided_temperatures=(0.5,), min_p=0.1))
    assert list(guided) == ["greedy, beta 3", "sampled at 0.5, beta 3"]
    assert {policy.decoder.rule.min_p for policy in guided.values()} == {0.1}


def test_damaged_files_of_figures_and_games(tmp_path):
    (tmp_path / "choice.json").write_text("{")
    with pytest.raises(FileError, match=r"choice.json .*delete it: the numbers are counted again"):
        _ = Counter(tmp_path, "bc").measured
    Numbers(numbers=(1, 2)).write(tmp_path / "test" / "greedy_beta_1.json")
    (tmp_path / "test" / "greedy_beta_1.json").write_text('{"numbers": [1, 3], "version": 1}')
    with pytest.raises(FileError, match=r"was changed .*delete it: the numbers are counted again"):
        Counter(tmp_path, "bc").test("greedy, beta 1")


def test_results_of_other_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ComparisonOptions(out=tmp_path / "out", folder=Path("data"), steps=5)
    options.record()
    options.record()
    changed = {"folder": tmp_path / "data", "methods": ("chai",), "seeds": 3}
    ComparisonOptions(out=tmp_path / "out", steps=5, **changed).record()
    longer = ComparisonOptions(out=tmp_path / "out", folder=Path("data"), steps=6)
    with pytest.raises(ValueError, match="holds a run with other options: --steps was 5 and is 6"):
        longer.record()
    longer.record("steps")
    assert json.loads((tmp_path / "out" / "options.json").read_text())["steps"] == 6


def test_options_as_words_and_as_json():
    options = ComparisonOptions(out=Path("out"), steps=5, layers=2, batch_size=8)
    assert options.of_training(3) == {"steps": 5, "seed": 3, "layers": 2, "batch-size": 8}
    content = options.as_json(1.234)
    assert list(content) == ["options", "minutes_of_this_call"]
    assert (content["options"]["out"], content["options"]["width"], content["minutes_of_this_call"]) == (
        "out",
        None,
        1.23,
    )
    with pytest.raises(ValueError, match="--methods has no magic"):
        ComparisonOptions(out=Path("out"), methods=("bc", "magic"))
