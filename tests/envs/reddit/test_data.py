"""Reading, choosing, splitting and generating Reddit comments, and their episodes."""

import hashlib
import random
import re
import warnings
from collections import Counter, defaultdict

import pytest
import torch

from tests.envs.reddit.csv_writer import DAMAGE, HEADER, NEGATIVE, POSITIVE, row, texts, write_csv, write_folder
from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
from torchrl_lang.envs.reddit.data import PARENT, CommentRow, ReadReport
from torchrl_lang.envs.reddit.generator import generated_comments
from torchrl_lang.text import CharTokenizer, Turn, from_row, to_rows

GOOD = [("well done", 12, "my tomatoes"), ('a "b", c\nd', 3, "p, q")]
BAD = [("so what", -4, "my tomatoes")]
PLACES = ["line 2", "line 3", "line 5", "line 9"]
DATA = RedditComments(["p0", "p1", "", "p3"], ["aa", "b", "ccc", "b"], [5, -2, 0, 5], PLACES)


def read(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return RedditComments.read(folder, on_bad_rows="report", **options)


def test_columns_by_position_positive_first_in_any_encoding(tmp_path):
    data = RedditComments.read(write_folder(tmp_path, GOOD, BAD))
    assert data.comments == ("well done", 'a "b", c\nd', "so what")
    assert data.scores == (12, 3, -4)
    assert data.parents == ("my tomatoes", "p, q", "my tomatoes")
    assert data.places == (f"{POSITIVE} line 2", f"{POSITIVE} line 3", f"{NEGATIVE} line 2")
    assert (data.report.rows, data.report.bad) == (3, ())


def test_any_text_comes_back(tmp_path):
    source = random.Random(0)
    rows = [(texts(source), source.randint(-99, 99), texts(source)) for _ in range(30)]
    for end in ("\n", "\r\n"):
        data = RedditComments.read(write_folder(tmp_path, rows[:20], rows[20:], end=end))
        assert list(zip(data.comments, data.scores, data.parents, strict=True)) == rows

    for options, encoding in (({"bom": b"\xef\xbb\xbf"}, "utf-8"), ({"encoding": "latin-1"}, "latin-1")):
        write_folder(tmp_path, [("caf\xe9", 1, "na\xefve")], [], **options)
        data = RedditComments.read(tmp_path, encoding=encoding)
        assert (data.comments, data.parents) == (("caf\xe9",), ("na\xefve",))


@pytest.mark.parametrize(
    ("line", "reason"), [("a,b,c", "3 fields"), (row("x", "1.5", "y"), "score"), (row(" ", 1, "y"), "empty comment")]
)
def test_malformed_rows_are_named_with_file_and_line(tmp_path, line, reason):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row(*GOOD[0]), line, row(*GOOD[1])])
    with pytest.raises(FileError, match=rf"3 rows were read, 1 is malformed: {POSITIVE} line 3 .*on_bad_rows='report'"):
        RedditComments.read(tmp_path)
    with pytest.warns(UserWarning, match="1 is malformed"):
        data = RedditComments.read(tmp_path, on_bad_rows="report")
    (bad,) = data.report.bad
    assert (bad.row, bad.place) == (1, f"{POSITIVE} line 3")
    assert reason in bad.error
    assert data.comments == (*(each[0] for each in GOOD), "so what")


def test_a_report_shows_five_rows():
    bad = tuple(CommentRow(number, f"a.csv line {number + 2}", error="has no score") for number in range(6))
    assert str(ReadReport(9, bad[:5])).endswith("; a.csv line 6 has no score")
    assert str(ReadReport(9, bad)).endswith("; a.csv line 6 has no score; ...")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_lose_no_row(tmp_path, seed):
    """Rows read and rows reported are the rows present, each at its line; a long list of them is cut."""
    source = random.Random(seed)
    rows, good = [], []
    for _ in range(40):
        data, hit = row(texts(source), "SCORE", texts(source)).encode(), source.random() < 0.5
        data = source.choice(DAMAGE)(data, source) if hit else data
        rows.append(data.replace(b"SCORE", str(source.randint(-9, 9)).encode()))
        good.append(not hit)
    (tmp_path / NEGATIVE).write_text(HEADER + "\n")
    (tmp_path / POSITIVE).write_bytes(b"\n".join([HEADER.encode(), *rows, b""]))
    starts, line = [], 2
    for data in rows:
        starts.append(line)
        line += 1 + len(re.findall(rb"\r\n|\r|\n", data))
    found = read(tmp_path)
    assert found.report.rows + len(found.report.bad) == len(rows)
    places = [f"{POSITIVE} line {start}" for start in starts]
    assert found.places == tuple(place for place, fine in zip(places, good, strict=True) if fine)
    wrong = [(n, place) for n, (place, fine) in enumerate(zip(places, good, strict=True)) if not fine]
    assert [(bad.row, bad.place) for bad in found.report.bad] == wrong
    with pytest.raises(FileError, match=rf"{len(wrong)} are malformed: ([^;]*; ){{5}}\.\.\."):
        RedditComments.read(tmp_path)


def test_missing_files_and_headers(tmp_path):
    with pytest.raises(FileError, match=r"comments_positive\.csv is missing"):
        RedditComments.read(tmp_path)
    write_folder(tmp_path, GOOD, BAD)
    for content in (b"", b"a,b\n", b",".join([b"a"] * PARENT), row("x", 1, "y").encode(), row("x", "", "y").encode()):
        (tmp_path / NEGATIVE).write_bytes(content)
        with pytest.raises(FileError, match=f"{NEGATIVE} .*give a header"):
            RedditComments.read(tmp_path, on_bad_rows="report")


def test_index_files_select_rows_in_their_order_and_count_malformed_ones(tmp_path):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row(*GOOD[0]), "broken", row(*GOOD[1])])
    path = tmp_path / "train_idxs.json"
    path.write_text("[1, 3, 2]")
    with pytest.warns(UserWarning, match=r"3 rows were read, 1 is malformed: "):
        data = RedditComments.read(tmp_path, path, on_bad_rows="report")
    assert data.comments == ("so what", GOOD[1][0])
    path.write_text("[]")
    assert len(read(tmp_path, indices=path)) == 0


def test_wrong_index_files(tmp_path):
    path = write_folder(tmp_path, GOOD, BAD) / "train_idxs.json"
    wrong = {"[0, 1": "JSON", "[0, 1.0]": "row 1.0", "[-1]": "row -1", "[0, 3]": "have 3 rows", "[[0]]": r"row \[0\]"}
    for content, noun in (wrong | {"[0, 2, 0]": "row 0, which train_idxs.json has, too"}).items():
        path.write_text(content)
        with pytest.raises(FileError, match=noun):
            RedditComments.read(tmp_path, path)


def test_cutoffs():
    assert DATA.with_scores(at_least=1).comments == ("aa", "b")
    assert DATA.with_scores(at_least=0).places == ("line 2", "line 5", "line 9")
    assert DATA.with_scores(at_least=-100).comments == DATA.comments
    data = RedditComments(["p"] * 101, [f"c{n}" for n in range(101)], range(101))
    assert min(data.with_scores(quantile=0.07).scores) == 7  # though 0.07 * 100 is 7.000000000000001
    assert DATA.with_scores(quantile=0.9).scores == (5, 5)


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        (lambda: DATA.with_scores(at_least=6), r"None of 4 comments has a score of at least 6; the best is 5"),
        (lambda: DATA.take([]).with_scores(quantile=0.5), "None of 0 comments"),
        (lambda: DATA.with_scores(), "quantile"),
        (lambda: DATA.with_scores(at_least=1, quantile=0.5), "quantile"),
        (lambda: RedditComments(["p"], ["a", "b"], [1, 2]), "needs a parent and a score"),
        (lambda: RedditComments(["p"] * 2, ["a", "b"], [1, 2], ["file line 2"]), "all or none a place"),
        (lambda: DATA.split(1.0), "fraction"),
    ],
)
def test_refusals(call, noun):
    with pytest.raises(ValueError, match=noun):
        call()


def test_a_split_keeps_texts_together_and_does_not_depend_on_the_others():
    comments = [f"comment {number % 700}" for number in range(1000)]
    data = RedditComments(["p"] * 1000, comments, range(1000))
    train, held_out = data.split(0.25, seed=3)
    assert sorted(train.scores + held_out.scores) == list(range(1000))
    assert not set(train.comments) & set(held_out.comments)
    assert 180 < len(held_out) < 320
    assert set(data.take(range(100)).split(0.25, seed=3)[1].scores) == set(held_out.scores) & set(range(100))
    assert data.split(0.25, seed=4)[1].scores != held_out.scores


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
    without = DATA.episodes(torch.tensor([1.0, 2.0, 3.0, 4.0]), include_parent=False)
    assert [tuple(each.turns) for each in without] == [(Turn(text, n),) for n, text in enumerate(DATA.comments, 1)]


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


def test_a_folder_of_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        generate_reddit_comments(tmp_path, 10)
