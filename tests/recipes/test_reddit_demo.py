"""The Reddit demo: nothing is done twice, choices are made on other parents, and the figures are right."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from tests.recipes.commands import Trainings, interrupted_at, recorded_evaluations, words_of
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.task import RedditTask
from torchrl_lang.evaluation import Summary
from torchrl_lang.recipes import reddit_demo
from torchrl_lang.recipes.compare import CHOICE, REPORT
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.reddit_demo import CommentPlayer, Scorer, choose

SIZES = {"steps": 2, "layers": 1, "width": 16, "batch-size": 8, "choice-comments": 6, "comments": 12}
RUNS = {"bc": "profanity", "best-10": "profanity", "ilql": "profanity", "ilql-noised": "profanity_noised"}
TITLES = {"BC", "BC best 10 %", "ILQL", "ILQL, noised reward", "comments of the data"}


def command(home, out, *more, methods=("bc", "best-10", "ilql")):
    return main(["reddit", "--out", str(out), "--folder", str(home), "--methods", *methods, *words_of(SIZES), *more])


@pytest.fixture(scope="module", autouse=True)
def _few_decodings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(reddit_demo._WAYS, "temperatures", (0.5,))
        patch.setitem(reddit_demo._WAYS, "betas", (2.0, 4.0))
        yield


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
    whole = load_dataset(tmp_path / "whole", verify=True)
    with interrupted_at(CommentRows, "__call__", 3):
        assert generate("cut") == 130
    with interrupted_at(CommentRows, "__call__", -(-len(whole) // 32) - 1):  # two parts are not made again
        assert generate("cut") == 0
    cut = load_dataset(tmp_path / "cut", verify=True)
    assert (whole[:] == cut[:]).all()
    assert len(cut) == sum(score >= 1 for score in open_dataset(tmp_path / "cut")[1].data("train").scores) > 64


@pytest.fixture(scope="module")
def first_calls(home, tmp_path_factory):
    """A demo that is interrupted after two trainings, then after a file of figures; and the evaluations."""
    pytest.importorskip("profanity_check", reason="needs the extra reddit")
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut, rest = Trainings(stop_after=2), Trainings()
        cut.take_over(patch)
        assert command(home, out) == 130
        rest.take_over(patch)
        evaluations = recorded_evaluations(RedditTask, patch)
        with interrupted_at(CommentPlayer, "choose", 3):
            assert command(home, out) == 130
        assert command(home, out) == 0
    assert sorted(cut.done + rest.done) == sorted(RUNS)
    return out, evaluations


@pytest.fixture
def finished(first_calls):
    return first_calls[0]


def results_of(out):
    return json.loads((out / "results.json").read_text())["players"]


@pytest.mark.slow
def test_all_that_is_promised_is_there(first_calls):
    out, evaluations = first_calls
    results, report = results_of(out), (out / "report.txt").read_text()
    assert set(results) == TITLES
    for title, player in results.items():
        assert player["games"] == 12
        assert player["metrics"]["perplexity"] >= 1
        assert title in report
    assert "Each player's decoding was chosen on parents of validation comments" in report
    configs = {path.parent.name: json.loads(path.read_text()) for path in (out / "seed-0").glob("*/config.json")}
    assert {name: config["data"].rpartition("/")[2] for name, config in configs.items()} == RUNS
    # Decodings are chosen on other parents than those of the report, and nothing is played twice.
    assert {(split, seed) for split, seed, _ in evaluations} == {CHOICE, REPORT}
    assert [games for split, _, games in evaluations if split == "test"] == [12] * 4
    assert [games for split, _, games in evaluations if split == "val"] == [6] * (2 * 2 + 2 * 2 * 2)
    limits = Scorer(load_run(out / "seed-0" / "bc").task, out / "seed-0" / "bc", {CHOICE: 6}).limits
    for title, folder in (("BC", "bc"), ("ILQL", "ilql")):
        found = json.loads((out / "seed-0" / folder / "choice.json").read_text())["summaries"]
        assert results[title]["decodings"] == [choose({way: Summary(**each) for way, each in found.items()}, limits)]


@pytest.mark.slow
def test_perplexity_and_reward_of_the_data_by_a_plain_loop(finished):
    from profanity_check import predict_prob

    bc = load_run(finished / "seed-0" / "bc")
    task, control = bc.task, bc.tokenizer.control
    data, total, tokens, rewards = task.data("test"), 0.0, 0, []
    for parent, text in list(zip(data.parents, data.comments, strict=True))[:12]:
        before = [control.begin_state, *bc.tokenizer.encode(parent), control.end_of_state]
        comment = [*bc.tokenizer.encode(text), control.end_of_action]
        with torch.no_grad():
            log_prob = bc.model.lm.eval()(torch.tensor([[*before, *comment]])).logits[0].double().log_softmax(-1)
        total -= sum(float(log_prob[len(before) + place - 1, token]) for place, token in enumerate(comment))
        tokens += len(comment)
        p = float(max(predict_prob(re.split(r"(?<=[.!?])\s+", text))))
        rewards.append(-5.0 * ((p >= 1 / 3) + (p >= 2 / 3)))
    found = results_of(finished)["comments of the data"]
    assert found["metrics"]["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    assert found["mean_return"] == pytest.approx(sum(rewards) / 12)
    assert found["metrics"]["profanity"] == pytest.approx(sum(each < 0 for each in rewards) / 12)
    assert found["entropy"] is None


@pytest.mark.slow
def test_other_methods_by_name(home, copied, trainings, capsys, monkeypatch):
    evaluations = recorded_evaluations(RedditTask, monkeypatch)
    assert command(home, copied, methods=("awac",)) == 0
    assert trainings.done == ["awac"]
    assert len(evaluations) == 2 + 1  # those of BC are there
    assert set(results_of(copied)) == {"BC", "AWAC", "comments of the data"}  # BC measures perplexity
    assert command(home, copied, "--steps", "3") == 2
    assert "holds a run with other options" in capsys.readouterr().err


def test_comments_are_generated_once(tmp_path, monkeypatch):
    pytest.importorskip("profanity_check", reason="needs the extra reddit")

    def stop(runs):
        assert {run.out.name for run in runs} == {*RUNS, "best-30"}
        raise KeyboardInterrupt

    monkeypatch.setattr(reddit_demo.compare, "train_missing", stop)
    for _ in range(2):
        assert main(["reddit", "--out", str(tmp_path / "out"), "--pairs", "150"]) == 130
    assert len(RedditComments.read(tmp_path / "out" / "comments")) == 150


def test_the_rule_of_choice():
    base = Summary("", 100, -2.0, 0.25, 0.8, 0.04, 1.0, metrics={"distinct_2": 0.5, "perplexity": 2.0})

    def way(reward, **metrics):
        return replace(base, mean_return=reward, metrics=base.metrics | metrics)

    ways = {"greedy": way(0.0, distinct_2=0.39), "wild": way(0.0, perplexity=2.21), "worse": way(-1.5)}
    ways |= {"at the limits": way(-1.0, distinct_2=0.4, perplexity=2.2), "varied": way(-1.0, distinct_2=0.45)}
    assert choose(ways, base) == "varied"
    del ways["varied"]
    assert choose(ways, base) == "at the limits"
    nearest = {name: ways[name] for name in ("greedy", "wild")}
    assert choose(nearest, base) == "wild"  # 2.21 / 2.2 is less than 0.4 / 0.39
    assert choose({"silent": way(0.0, distinct_2=0.0)}, base) == "silent"
