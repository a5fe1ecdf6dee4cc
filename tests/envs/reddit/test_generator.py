"""Generated comments: their layout, and what they must be like to learn from."""

import hashlib
from collections import Counter, defaultdict

import pytest

from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
from torchrl_lang.envs.reddit.generator import generated_comments

COMMENTS = generated_comments(4000)


def rude_rate(comments):
    return sum(comment.is_rude for comment in comments) / len(comments)


def test_different_pairs_of_parent_and_comment():
    assert len({(comment.parent, comment.text) for comment in COMMENTS}) == 4000
    assert len({comment.parent for comment in COMMENTS}) > 1000
    assert generated_comments(4000) == COMMENTS
    assert COMMENTS[:100] == generated_comments(100)
    assert generated_comments(4000, seed=1) != COMMENTS


@pytest.mark.parametrize("first", [lambda text: text.split()[0], lambda text: text[0], lambda text: text[:3]])
def test_the_first_token_does_not_show_rudeness(first):
    """The best classifier on it, trained on half of the data, is hardly better than the more frequent answer."""
    votes = defaultdict(Counter)
    for comment in COMMENTS[:2000]:
        votes[first(comment.text)][comment.is_rude] += 1
    right = sum(votes[first(each.text)].most_common(1)[0][0] == each.is_rude for each in COMMENTS[2000:]) / 2000
    chance = max(rude_rate(COMMENTS[2000:]), 1 - rude_rate(COMMENTS[2000:]))
    assert right <= chance + 0.02


def test_scores_follow_rudeness_and_parent():
    liked = defaultdict(list)
    for comment in COMMENTS:
        assert comment.score != 0
        liked[comment.is_rude, comment.parent_kind].append(comment.score > 0)
    rates = {key: sum(each) / len(each) for key, each in liked.items()}
    assert rates[False, "calm"] == pytest.approx(0.8, abs=0.04)
    assert rates[False, "provoking"] == pytest.approx(0.8, abs=0.06)
    assert rates[True, "calm"] == pytest.approx(0.2, abs=0.08)
    assert rates[True, "provoking"] == pytest.approx(0.4, abs=0.05)


def test_profane_comments_are_flagged_and_polite_ones_are_not():
    predict = pytest.importorskip("profanity_check").predict
    flagged = defaultdict(list)
    for comment, flag in zip(COMMENTS, predict([comment.text for comment in COMMENTS]), strict=True):
        flagged[comment.kind].append(flag)
    rates = {kind: sum(each) / len(each) for kind, each in flagged.items()}
    assert rates["profanity"] > 0.99
    assert rates["insult"] > 0.85
    assert 0.4 < rates["scorn"] < 0.9
    assert max(rates[kind] for kind in rates.keys() - {"profanity", "insult", "scorn"}) < 0.01


def test_files(tmp_path):
    generate_reddit_comments(tmp_path / "a", 300, seed=5)
    generate_reddit_comments(tmp_path / "b", 300, seed=5)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    splits = ["eval_idxs.json", "test_idxs.json", "train_idxs.json"]
    assert names == sorted(["comments_positive.csv", "comments_negative.csv", *splits])
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    data = RedditComments.read(tmp_path / "a")
    expected = {(each.parent, each.text, each.score) for each in generated_comments(300, seed=5)}
    assert set(zip(data.parents, data.comments, data.scores, strict=True)) == expected
    positive = [place.startswith("comments_positive.csv line ") for place in data.places]
    assert [score > 0 for score in data.scores] == positive
    parts = [RedditComments.read(tmp_path / "a", tmp_path / "a" / name) for name in splits]
    assert [len(part) for part in parts] == [30, 30, 240]
    pairs = [pair for part in parts for pair in zip(part.parents, part.comments, strict=True)]
    assert len(set(pairs)) == 300


def test_the_comments_of_a_seed_stay_the_same():
    text = repr([tuple(comment) for comment in generated_comments(2000, seed=3)])
    assert hashlib.sha256(text.encode()).hexdigest().startswith("ba7912131ee90c91")
    text = repr([tuple(comment) for comment in generated_comments(2000, seed=3, sentences=4, rude_when_calm=0.7)])
    assert hashlib.sha256(text.encode()).hexdigest().startswith("1248ac2ea28c0396")


def test_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="sentences"):
        generated_comments(3, sentences=0)
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        generate_reddit_comments(tmp_path, 10)
