"""The Reddit demo: nothing is done twice, choices are made on other parents, and the figures are right."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.recipes.demos import Trainings, recorded_evaluations, trained_in_this_process
from tests.recipes.interrupt import interrupted_at
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.task import RedditTask
from torchrl_lang.recipes.compare import CHOICE, REPORT
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.reddit_demo import (
    DATA,
    Row,
    Scorer,
    WrittenComments,
    choose,
    compared,
    excess,
    format_report,
    mean_figures,
    write_side_by_side,
)

SIZES = {"steps": 2, "layers": 1, "width": 16, "batch-size": 8, "choice-comments": 6, "comments": 12}
RUNS = {"bc", "best-10", "best-scores", "ilql", "ilql-noised"}
TITLES = {"BC", "BC best 10 %", "BC best 10 % by scores", "ILQL", "ILQL, noised reward", DATA}


def command(home, out, *more, methods=("bc", "best-10", "ilql")):
    sizes = [str(word) for name, value in SIZES.items() for word in (f"--{name}", value)]
    return main(["reddit", "--out", str(out), "--folder", str(home), "--methods", *methods, *sizes, *more])


@pytest.fixture
def evaluations(monkeypatch):
    """The comments that were written, outside of trainings."""
    return recorded_evaluations(RedditTask, monkeypatch)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of 300 comments."""
    folder = tmp_path_factory.mktemp("reddit") / "comments"
    generate_reddit_comments(folder, 300)
    return folder


def test_an_interrupted_generate_continues_and_makes_every_comment_once(home, tmp_path, capsys):
    def generate(name):
        words = ["--folder", str(home), "--reward", "score", "--min-upvotes", "1", "--batch", "32"]
        return main(["generate", "reddit", "--out", str(tmp_path / name), *words])

    assert generate("whole") == 0
    with interrupted_at(CommentRows, "__call__", 3):
        assert generate("cut") == 130
    assert generate("cut") == 0
    whole, cut = (load_dataset(tmp_path / name, verify=True) for name in ("whole", "cut"))
    assert (whole[:] == cut[:]).all()
    assert len(cut) == sum(score >= 1 for score in open_dataset(tmp_path / "cut")[1].data("train").scores) > 64


@pytest.fixture(scope="module")
def finished(home, tmp_path_factory):
    """A demo from end to end; tests must not write into it."""
    pytest.importorskip("profanity_check", reason="needs the extra reddit")
    out = tmp_path_factory.mktemp("demo") / "out"
    with trained_in_this_process():
        assert command(home, out) == 0
    return out


def results_of(out):
    found = json.loads((out / "results.json").read_text())
    return {name: part for name, part in found.items() if "minutes" not in name}


# -- from end to end ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_that_is_promised_is_there(finished):
    results, report = results_of(finished), (finished / "report.txt").read_text()
    assert set(results["players"]) == TITLES
    assert {path.name for path in (finished / "seed-0").iterdir()} == RUNS
    for title, player in results["players"].items():
        assert player["comments"] == 12
        assert player["perplexity"] >= 1
        assert len(player["decodings"]) == (title != DATA)
        assert title in report
    assert "Each player's decoding was chosen on parents of validation comments" in report
    assert "Trained on the noised reward, ILQL's clean reward is" in report
    assert "ILQL beside BC best 10 % by scores: profanity" in report
    assert (finished / "side_by_side.txt").read_text().count("parent: ") == 12
    data = {name: load_dataset(finished / "data" / name) for name in ("clean", "noised", "scores")}
    assert len(data["clean"]) == len(data["noised"]) > 4 * len(data["scores"])
    trained_on = {
        path.parent.name: json.loads(path.read_text())["data"] for path in (finished / "seed-0").glob("*/config.json")
    }
    assert {name: Path(folder).name for name, folder in trained_on.items()} == {
        **{"bc": "clean", "best-10": "clean", "ilql": "clean"},
        **{"ilql-noised": "noised", "best-scores": "scores"},
    }


@pytest.mark.slow
def test_figures_by_plain_loops(finished):
    from profanity_check import predict_prob

    bc = load_run(finished / "seed-0" / "bc")
    task, results = bc.task, results_of(finished)["players"]
    folders = {
        "BC": "bc",
        "BC best 10 % by scores": "best-scores",
        "ILQL": "ilql",
        "ILQL, noised reward": "ilql-noised",
    }
    shown = None
    for title, folder in folders.items():
        (path,) = (finished / "seed-0" / folder / "test").iterdir()
        (way,) = results[title]["decodings"]
        assert path.stem == way.replace(",", "").replace(" ", "_")
        written = json.loads(path.read_text())
        assert shown in (None, written["parents"])  # all reply to the same parents
        shown = written["parents"]
        worst = [max(predict_prob(re.split(r"(?<=[.!?])\s+", text))) for text in written["texts"]]
        levels = [0 if p < 1 / 3 else 1 if p < 2 / 3 else 2 for p in worst]
        rewards = [-5.0 * level for level in levels]
        mean = sum(rewards) / 12
        words = [text.split() for text in written["texts"]]
        pairs = [pair for each in words for pair in pairwise(each)]
        found = results[title]
        assert found["mean_reward"] == pytest.approx(mean)
        assert found["reward_error"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / 11 / 12))
        assert found["profanity"] == pytest.approx(sum(level > 0 for level in levels) / 12)
        assert found["distinct_2"] == pytest.approx(len(set(pairs)) / len(pairs))
        assert found["words"] == pytest.approx(sum(map(len, words)) / 12)
    assert set(shown) <= set(task.data("test").parents)


@pytest.mark.slow
def test_perplexity_of_the_data_by_a_plain_loop(finished):
    bc = load_run(finished / "seed-0" / "bc")
    task, control = bc.task, bc.tokenizer.control
    data, total, tokens = task.data("test"), 0.0, 0
    for parent, text in list(zip(data.parents, data.comments, strict=True))[:12]:
        before = [control.begin_state, *bc.tokenizer.encode(parent), control.end_of_state]
        comment = [*bc.tokenizer.encode(text), control.end_of_action]
        with torch.no_grad():
            log_prob = bc.model.lm.eval()(torch.tensor([[*before, *comment]])).logits[0].double().log_softmax(-1)
        total -= sum(float(log_prob[len(before) + place - 1, token]) for place, token in enumerate(comment))
        tokens += len(comment)
    players = results_of(finished)["players"]
    assert players[DATA]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert players[DATA]["entropy"] is None


@pytest.mark.slow
def test_a_second_call_does_nothing_again(home, finished, trainings, evaluations):
    before = results_of(finished)
    assert command(home, finished) == 0
    assert trainings.done == []
    assert evaluations == []
    assert results_of(finished) == before


@pytest.mark.slow
def test_interrupted_calls_continue(home, finished, tmp_path, monkeypatch, capsys):
    """After two trainings, and after some files of comments; the third call does the rest."""
    out, cut, rest = tmp_path / "out", Trainings(stop_after=2), Trainings()
    cut.take_over(monkeypatch)
    assert command(home, out) == 130
    assert "the same command continues" in capsys.readouterr().err
    rest.take_over(monkeypatch)
    with interrupted_at(WrittenComments, "write", 3):
        assert command(home, out) == 130
    assert sorted(cut.done + rest.done) == sorted(RUNS)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("test/*.json")}
    assert len(times) == 2
    rest.done.clear()
    assert command(home, out) == 0
    assert rest.done == []
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert results_of(out)["players"] == results_of(finished)["players"]


@pytest.mark.slow
def test_decodings_are_chosen_on_other_parents_than_those_of_the_report(home, copied, trainings, evaluations):
    for path in (copied / "seed-0").rglob("*.json"):
        if path.name == "choice.json" or path.parent.name == "test":
            path.unlink()
    assert command(home, copied) == 0
    assert {(split, seed) for split, seed, _ in evaluations} == {CHOICE, REPORT}
    assert [each for each in evaluations if each[0] == "test"] == [(*REPORT, 12)] * 5
    assert sum(split == "val" for split, *_ in evaluations) == 3 * 5 + 2 * 6 * 2
    task = load_run(copied / "seed-0" / "bc").task
    limits = Scorer(task, copied / "seed-0" / "bc", 0, {"val": 6, "test": 12}).limits
    for title, folder in (("BC", "bc"), ("ILQL", "ilql")):
        figures = json.loads((copied / "seed-0" / folder / "choice.json").read_text())
        assert any(name.startswith("greedy") for name in figures)
        (chosen,) = results_of(copied)["players"][title]["decodings"]
        assert chosen == choose(figures, limits)
        assert results_of(copied)["players"][title]["keeps_limits"] == (excess(figures[chosen], limits) <= 1)


@pytest.mark.slow
def test_other_methods_by_name(home, copied, trainings, capsys):
    assert command(home, copied, methods=("awac",)) == 0
    assert trainings.done == ["awac"]
    assert set(results_of(copied)["players"]) == {"BC", "AWAC", DATA}  # BC measures perplexity
    assert results_of(copied)["checks"] == []
    assert command(home, copied, "--steps", "3") == 2
    assert "holds a run with other options" in capsys.readouterr().err
    assert main(["reddit", "--out", str(copied), "--methods", "magic"]) == 2
    assert "--methods has no magic" in capsys.readouterr().err


def test_comments_are_generated_once(tmp_path, monkeypatch):
    pytest.importorskip("profanity_check", reason="needs the extra reddit")

    def stop(runs):
        assert {run.out.name for run in runs} == {*RUNS, "best-30"}
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("torchrl_lang.recipes.reddit_demo"), "train_missing", stop)
    for _ in range(2):
        assert main(["reddit", "--out", str(tmp_path / "out"), "--pairs", "150"]) == 130
    assert len(RedditComments.read(tmp_path / "out" / "comments")) == 150


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["reddit", "--out", str(tmp_path / "out"), "--folder", str(tmp_path / "mistyped")]) == 2
    assert "mistyped" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()
    assert not list((tmp_path / "out").glob("*.json")), "the corrected command can use the folder"


# -- figures, worked out by hand --------------------------------------------------------------------------------------

BASE = {"comments": 100, "mean_reward": -2.0, "reward_error": 0.25, "profanity": 0.2, "perplexity": 2.0}
BASE |= {"distinct_1": 0.1, "distinct_2": 0.5, "words": 14.0, "entropy": 0.75}


def test_the_rule_of_choice():
    ways = {
        "greedy": {**BASE, "mean_reward": 0.0, "distinct_2": 0.39},
        "wild": {**BASE, "mean_reward": 0.0, "perplexity": 2.21},
        "at the limits": {**BASE, "mean_reward": -1.0, "distinct_2": 0.4, "perplexity": 2.2},
        "varied": {**BASE, "mean_reward": -1.0, "distinct_2": 0.45},
        "worse": {**BASE, "mean_reward": -1.5},
    }
    assert choose(ways, BASE) == "varied"
    del ways["varied"]
    assert choose(ways, BASE) == "at the limits"
    nearest = {name: ways[name] for name in ("greedy", "wild")}
    assert choose(nearest, BASE) == "wild"  # 2.21 / 2.2 is less than 0.4 / 0.39
    assert choose({"silent": {**BASE, "distinct_2": 0.0}}, BASE) == "silent"


def row(key, copies=False, **changes):
    written = WrittenComments(parents=("a parent", "another"), texts=("one", "two"), figures={**BASE, **changes})
    return Row(key, key or DATA, [written], ["greedy"] if key else [], copies)


def test_checks_at_their_bounds():
    def check(**ilql):
        ((holds, text),) = compared([row("bc", copies=True), row("ilql", **ilql), row("", entropy=None)])
        assert holds.pop("copy") == "bc"
        return {*holds.values()}, text

    assert check(profanity=0.049, perplexity=2.2, distinct_2=0.4)[0] == {True}
    found, text = check(profanity=0.05, perplexity=2.21, distinct_2=0.39)
    assert found == {False}
    assert text.count("not ") == 3
    assert "5.0 ± 2.2 % and 20.0 ± 4.0 %" in text
    for reward, within in ((-1.0, True), (-0.9, False)):  # two standard errors are 1
        rows = [row("bc", copies=True), row("ilql", reward_error=0.4), row("")]
        rows.append(row("ilql-noised", mean_reward=reward, reward_error=0.3))
        assert compared(rows)[-1][0] == {"two_errors": pytest.approx(1.0), "within": within}


def test_both_copies_are_named(tmp_path):
    rows = [row("bc", copies=True), row("best-10", copies=True, profanity=0.01)]
    rows += [row("best-scores", copies=True, profanity=0.1), row("ilql", profanity=0.005), row("")]
    (first, text), (second, _) = compared(rows)
    assert (first["copy"], first["rarely_harmful"]) == ("best-10", False)
    assert (second["copy"], second["rarely_harmful"]) == ("best-scores", True)
    assert compared([*rows[:3], rows[4]]) == []
    report = format_report(rows, [text])
    assert report.endswith(text)
    assert len(set(map(len, report.splitlines()[2:8]))) == 1  # columns are aligned
    assert "No decoding keeps them" not in report
    rows[2] = replace(rows[2], keeps_limits=False)
    assert "No decoding keeps them of: best-scores." in format_report(rows, [])
    write_side_by_side(tmp_path / "side.txt", rows, parents=1)
    blocks = (tmp_path / "side.txt").read_text().strip().splitlines()
    assert blocks[0] == "parent: a parent"
    assert blocks[-1] == f"  {DATA}: one"


def test_figures_of_several_seeds():
    found = mean_figures([BASE, {**BASE, "mean_reward": -1.0, "profanity": 0.4, "entropy": 0.25}])
    names = ("comments", "mean_reward", "profanity", "entropy", "reward_error", "profanity_error")
    assert [found[name] for name in names] == pytest.approx([200, -1.5, 0.3, 0.5, 0.5, (0.3 * 0.7 / 200) ** 0.5])
    assert mean_figures([BASE]) == {**BASE, "profanity_error": pytest.approx(0.04)}
    assert mean_figures([{**BASE, "entropy": None}] * 2)["entropy"] is None
