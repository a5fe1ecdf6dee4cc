"""Cutoffs, splits and episodes of Reddit comments."""

from __future__ import annotations

import math
import random

import pytest
import torch

from torchrl_lang.envs.reddit import RedditComments, rewards_of
from torchrl_lang.text import CharTokenizer, Turn, from_row, to_rows

DATA = RedditComments(
    ["p0", "p1", "", "p3"],
    ["aa", "b", "ccc", "b"],
    [5, -2, 0, 5],
    ["positive"] * 4,
    [2, 3, 5, 9],
)


def test_absolute_cutoffs():
    assert DATA.with_scores(at_least=1).comments == ("aa", "b")
    assert DATA.with_scores(at_least=0).lines == (2, 5, 9)
    assert DATA.with_scores(at_least=-100).comments == DATA.comments
    with pytest.raises(ValueError, match=r"None of 4 comments has a score of at least 6; the best is 5"):
        DATA.with_scores(at_least=6)


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.5, 0.77, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("n", [1, 7, 100])
def test_quantile_cutoffs_keep_the_best_of_different_scores(n, quantile):
    scores = random.Random(n).sample(range(-500, 500), n)
    data = RedditComments(["p"] * n, [str(score) for score in scores], scores)
    kept = data.with_scores(quantile=quantile)
    many = n - math.ceil(quantile * (n - 1))
    assert sorted(kept.scores) == sorted(scores)[n - many :]
    assert list(kept.comments) == [str(score) for score in scores if score in kept.scores]  # in their order


def test_quantiles_are_not_rounded_up_by_floating_point():
    """0.07 * 100 is 7.000000000000001."""
    data = RedditComments(["p"] * 101, [f"c{n}" for n in range(101)], range(101))
    assert min(data.with_scores(quantile=0.07).scores) == 7


def test_quantile_cutoffs_keep_all_of_a_score():
    assert DATA.with_scores(quantile=0.9).scores == (5, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either"),
        ({"at_least": 1, "quantile": 0.5}, "either"),
        ({"quantile": 1.5}, "quantile must lie"),
        ({"at_least": math.nan}, "at_least must be a finite number"),
    ],
)
def test_wrong_cutoffs(options, message):
    with pytest.raises(ValueError, match=message):
        DATA.with_scores(**options)


def test_no_comments_have_no_best():
    with pytest.raises(ValueError, match="None of 0 comments"):
        RedditComments([], [], []).with_scores(quantile=0.5)


def test_columns_of_one_length():
    with pytest.raises(ValueError, match="Each comment needs a parent and a score"):
        RedditComments(["p"], ["a", "b"], [1, 2])
    with pytest.raises(ValueError, match="either each or none a line"):
        RedditComments(["p"] * 2, ["a", "b"], [1, 2], ["file"], [2])


def test_a_split_keeps_texts_together_and_does_not_depend_on_the_others():
    texts = [f"comment {number % 700}" for number in range(1000)]
    data = RedditComments(["p"] * 1000, texts, range(1000))
    train, held_out = data.split(0.25, seed=3)
    assert sorted(train.scores + held_out.scores) == list(range(1000))
    assert not set(train.comments) & set(held_out.comments)
    assert 180 < len(held_out) < 320
    assert set(data.take(range(100)).split(0.25, seed=3)[1].scores) == set(held_out.scores) & set(range(100))
    assert data.split(0.25, seed=4)[1].scores != held_out.scores
    with pytest.raises(ValueError, match="fraction must lie in"):
        data.split(1.0)


def test_episodes_of_one_step():
    tokenizer = CharTokenizer.from_alphabet("abcp0123")
    episodes = DATA.episodes(lambda texts: [len(text) for text in texts], scale=-5.0, shift=1.0)
    assert [tuple(episode.turns) for episode in episodes] == [
        (Turn("p0"), Turn("aa", -9.0)),
        (Turn("p1"), Turn("b", -4.0)),
        (Turn("ccc", -14.0),),  # an empty parent
        (Turn("p3"), Turn("b", -4.0)),
    ]
    assert all(episode.terminated and not episode.truncated for episode in episodes)
    rows = to_rows(episodes, tokenizer, 12)
    assert tokenizer.decode(rows["tokens"][0, :8]) == "<s>p0</s>aa</a></eod>"
    assert rows["token_reward"].sum(-1).tolist() == [-9.0, -4.0, -14.0, -4.0]
    assert from_row(rows[2], tokenizer) == episodes[2]


def test_episodes_without_parent():
    episodes = DATA.episodes(torch.tensor([1.0, 2.0, 3.0, 4.0]), include_parent=False)
    assert [tuple(episode.turns) for episode in episodes] == [
        (Turn(text, value),) for text, value in zip(DATA.comments, [1.0, 2.0, 3.0, 4.0], strict=True)
    ]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([1.0], "one number for each of 4 texts"),
        (torch.ones(4, 1), "one number for each of 4 texts"),
        (lambda texts: None, "one number for each of 4 texts"),
        (lambda texts: ["good"] * 4, "one number for each of 4 texts"),
        ([1.0, math.nan, 0.0, 0.0], "must be finite, got nan for 'b'"),
        ([1.0, 0.0, 1e300, 0.0], "must be finite, got inf for 'ccc'"),
    ],
)
def test_wrong_rewards(reward, message):
    with pytest.raises(ValueError, match=message):
        DATA.episodes(reward)


def test_rewards_are_float32_on_the_cpu():
    values = rewards_of(lambda texts: torch.ones(2, dtype=torch.float64, requires_grad=True), ["a", "b"])
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert rewards_of(lambda texts: [], []).shape == (0,)
