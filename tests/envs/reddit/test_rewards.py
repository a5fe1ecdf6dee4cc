"""Rewards of texts: values worked out by hand, missing packages, wrong rewards, and a file that keeps values."""

import math
import multiprocessing
import pickle
import sqlite3
import sys

import pytest
import torch

from tests.envs.reddit.conftest import UNREADABLE
from torchrl_lang._files import FileError
from torchrl_lang.envs import reddit
from torchrl_lang.envs.reddit.rewards import rewards_of
from torchrl_lang.envs.reddit.upvotes import TfidfModel


def constant(*values):
    return lambda texts: torch.tensor(values[: len(texts)])


def test_scores_of_dataset_comments():
    texts = ["up", "down", "zero", "twice", "twice", "even", "even"]
    reward = reddit.ScoreReward(reddit.RedditComments(["p"] * 7, texts, [3, -3, 0, 5, -4, 5, -5]))
    assert reward(["down", "up", "zero", "twice", "even"]).tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0]
    assert reward(["up"]).dtype == torch.float32
    assert reward([]).shape == (0,)
    data = reddit.RedditComments(["p"], ["up"], [3])
    with pytest.raises(ValueError, match=r"None of the 1 comments of the dataset is 'else': .*unknown=0.0"):
        reddit.ScoreReward(data)(["up", "else"])
    assert reddit.ScoreReward(data, unknown=-0.5)(["else", "up", *UNREADABLE]).tolist() == [-0.5, 1.0] + [-0.5] * 8


def test_three_levels_and_the_worst_sentence():
    levels = reddit.ThreeLevels(constant(0.0, 0.24, 0.25, 0.74, 0.75, 1.0), low=0.25, high=0.75)
    assert levels(list("abcdef")).tolist() == [0, 0, 1, 1, 2, 2]

    seen = []

    def lengths(texts):
        seen.extend(texts)
        return torch.tensor([float(len(text)) for text in texts])

    texts = ["a. bbb! cc? d", "", "e.g. 3.5 km", "one\ntwo.  three"]
    assert reddit.WorstSentence(lengths)(texts).tolist() == [4.0, 0.0, 6.0, 8.0]
    assert seen == ["a.", "bbb!", "cc?", "d", "", "e.g.", "3.5 km", "one\ntwo.", "three"]
    assert reddit.WorstSentence(lengths)([]).shape == (0,)


def test_noise_changes_only_the_middle_level():
    values = [0.0, 1.0, 2.0] * 1000
    before = torch.get_rng_state()
    noised = reddit.Noised(constant(*values), seed=3)
    found = noised(["same text"] * 3000)
    levels = torch.tensor(values)
    assert torch.equal(found[levels != 1], levels[levels != 1])
    drawn = found[levels == 1]
    assert set(drawn.tolist()) == {0.0, 2.0}
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(reddit.Noised(constant(*values), seed=3)(["same text"] * 3000), found)
    assert not torch.equal(reddit.Noised(constant(*values), seed=4)(["same text"] * 3000), found)
    assert not torch.equal(noised(["same text"] * 3000), found)  # another draw
    assert torch.equal(before, torch.get_rng_state())


def test_profanity():
    pytest.importorskip("profanity_check")
    texts = ["thank you very much", "what the hell is this crap", "you are an idiot"]
    found = reddit.ProfanityReward()(texts)
    assert found.dtype == torch.float32
    assert found[0] < 0.1
    assert (found[1:] > 0.9).all()
    assert reddit.ProfanityReward(threshold=0.5)(texts).tolist() == [0.0, 1.0, 1.0]
    assert reddit.ProfanityReward()(UNREADABLE).isfinite().all()
    assert reddit.ProfanityReward()([]).shape == (0,)
    assert reddit.ThreeLevels(reddit.ProfanityReward())(texts).tolist() == [0.0, 2.0, 2.0]


def test_sentiment():
    pytest.importorskip("vaderSentiment")
    found = reddit.SentimentReward()(["i love it, it is great", "the table", "it is horrible and sad"])
    assert found.dtype == torch.float32
    assert (found > 0.5).tolist() == [True, False, False]
    assert (found < -0.5).tolist() == [False, False, True]
    assert reddit.SentimentReward()(UNREADABLE).isfinite().all()
    assert reddit.SentimentReward()([]).shape == (0,)


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("profanity_check", reddit.ProfanityReward),
        ("vaderSentiment.vaderSentiment", reddit.SentimentReward),
        ("sklearn.feature_extraction.text", lambda: TfidfModel.fit(["a"], [True])),
    ],
)
def test_missing_packages_name_the_extra(monkeypatch, package, make):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"torchrl-lang\[reddit\]"):
        make()


def test_scale_shift_and_type():
    assert rewards_of(constant(0.0, 1.0, 2.0), list("abc"), scale=-5.0, shift=1.0).tolist() == [1.0, -4.0, -9.0]
    values = rewards_of(lambda texts: torch.ones(2, dtype=torch.float64, requires_grad=True), ["a", "b"])
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert rewards_of(lambda texts: [], []).shape == (0,)


@pytest.mark.parametrize("found", [[1.0], torch.ones(2, 1), None, ["good"] * 2])
@pytest.mark.parametrize("wrap", [lambda reward: reward, reddit.ThreeLevels, reddit.Noised, reddit.WorstSentence])
def test_rewards_that_are_not_one_number_for_each_text(found, wrap):
    with pytest.raises(ValueError, match="one number for each of 2 texts"):
        rewards_of(wrap(lambda texts: found), ["a", "b"])


@pytest.mark.parametrize(
    ("values", "scale"), [([0.0, 1e39], 1.0), ([0.0, 1e38], -10.0), ([0.0, math.nan], 0.0), ([1.0, 1.0], math.inf)]
)
def test_rewards_that_are_not_finite(values, scale):
    with pytest.raises(ValueError, match="must be finite"):
        rewards_of(lambda texts: values, ["a", "b"], scale=scale)


class Lengths:
    """Scores texts by their lengths times a factor, and counts them."""

    def __init__(self, factor=1.0):
        self.factor, self.scored = factor, []

    def __call__(self, texts):
        self.scored += texts
        return torch.tensor([self.factor * len(text) for text in texts])


def test_each_text_is_scored_once(tmp_path):
    inner = Lengths(1 / 3)
    reward = reddit.CachedReward(inner, tmp_path / "new" / "rewards.sqlite", model="lengths", batch_size=2)
    texts = ["a", "bb", "a", "", "ccc", "bb"]
    direct = Lengths(1 / 3)(texts)
    assert torch.equal(reward(texts), direct)
    assert inner.scored == ["a", "bb", "", "ccc"]
    assert torch.equal(reward(texts[::-1]), direct.flip(0))  # float32 comes back as it was
    again = reddit.CachedReward(inner, tmp_path / "new" / "rewards.sqlite", model="lengths")
    assert torch.equal(again(texts), direct)
    assert len(inner.scored) == 4
    assert (reward([]).shape, reward([]).dtype) == ((0,), torch.float32)
    texts = ["\0", "a\0b", "\ud800", "é", "é", "' OR 1=1; --", "\N{GRINNING FACE}" * 3, "a", "A"]
    inner = Lengths()
    reward = reddit.CachedReward(inner, tmp_path / "rewards.sqlite", model="lengths")
    assert torch.equal(reward(texts), Lengths()(texts))
    assert torch.equal(reward(texts), Lengths()(texts))
    assert len(inner.scored) == len(set(texts))


def _work(path, barrier, factor, found):
    reward = reddit.CachedReward(Lengths(factor), path, model="m", batch_size=7)
    barrier.wait(30)
    found.put(reward([f"text {number}" for number in range(40)]).tolist())


def test_two_processes_agree_on_what_was_stored_first(tmp_path):
    """They score differently, so that a value of which the other returned another would show."""
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(3), context.Queue()
    path = tmp_path / "rewards.sqlite"
    workers = [context.Process(target=_work, args=(path, barrier, factor, found)) for factor in (1.0, 2.0, 3.0)]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert results[0] == results[1] == results[2]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT COUNT(*) FROM rewards").fetchone() == (40,)


def test_models_have_their_own_values_and_copies_open_the_file_themselves(tmp_path):
    path = tmp_path / "rewards.sqlite"
    one = reddit.CachedReward(Lengths(1.0), path, model="one")
    assert one(["ab"]).item() == 2.0
    assert reddit.CachedReward(Lengths(2.0), path, model="two")(["ab"]).item() == 4.0
    assert reddit.CachedReward(Lengths(9.0), path, model="one")(["ab"]).item() == 2.0
    assert pickle.loads(pickle.dumps(one))(["ab"]).item() == 2.0  # noqa: S301
    path.unlink()  # deleted in use
    assert one(["a", "bc"]).tolist() == [1.0, 2.0]
    assert reddit.CachedReward(None, path, model="one")(["bc"]).tolist() == [2.0]


def test_files_of_something_else_stay_as_they_are(tmp_path, monkeypatch):
    """Their rewards may have been paid for."""
    monkeypatch.setattr("torchrl_lang.envs.reddit.rewards._PATIENCE", 0.01)
    with sqlite3.connect(tmp_path / "other.sqlite") as file:
        file.execute("CREATE TABLE rewards (name TEXT)")
    (tmp_path / "text").write_bytes(b"no database " * 100)
    for path in (tmp_path / "other.sqlite", tmp_path / "text", tmp_path, tmp_path / "text" / "below"):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(FileError, match=r"cache of rewards .*: try again, or give another file\.$"):
            reddit.CachedReward(Lengths(), path, model="m")(["a"])
        assert before is None or path.read_bytes() == before
    reward = reddit.CachedReward(Lengths(), tmp_path / "locked.sqlite", model="m")
    with sqlite3.connect(tmp_path / "locked.sqlite") as file:
        file.execute("BEGIN EXCLUSIVE")
        with pytest.raises(FileError, match=r"locked"):
            reward(["a"])
    assert reward(["a"]).item() == 1.0


def test_wrong_rewards_are_not_stored(tmp_path):
    path = tmp_path / "rewards.sqlite"
    with pytest.raises(ValueError, match="must be finite"):
        reddit.CachedReward(Lengths(float("nan")), path, model="m")(["a"])
    assert reddit.CachedReward(Lengths(), path, model="m")(["a"]).item() == 1.0
