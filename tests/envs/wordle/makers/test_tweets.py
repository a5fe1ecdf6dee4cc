"""Tweets: every theme is read, and what is not a game is counted by its reason."""

from __future__ import annotations

import csv

import pytest

from torchrl_lang._files import FileError
from torchrl_lang.envs.wordle import PUZZLES, common_words, example_tweets, load_answers, read_tweets
from torchrl_lang.envs.wordle.colour_text import CODE_OF_SYMBOLS, SYMBOLS_OF_CODE
from torchrl_lang.envs.wordle.makers.tweets import grid

GREEN = "🟩🟩🟩🟩🟩"
MISS = "⬛🟨⬛⬛🟩"


def write(path, records, encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(records)
    return path


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([GREEN], [242]),
        ([MISS, GREEN], [29, 242]),
        (["⬜🟨⬜⬜🟩", "🟧🟧🟧🟧🟧"], [29, 242]),  # the light theme, and high contrast
        (["⬛🟦⬛⬛🟧", GREEN], [29, 242]),
        (["text before", MISS, "  " + GREEN + " ", "text after 🟩"], [29, 242]),
        (["⬛\ufe0f🟨⬛⬛🟩", GREEN], [29, 242]),
        ([MISS] * 6, [29] * 6),
        ([MISS] * 5 + [GREEN], [29] * 5 + [242]),
        (["Wordle 210 2/6*", MISS, GREEN, "1/6 yesterday"], [29, 242]),
        (["after 4/6, on 3/6/2022:", "Wordle 1,210 2/6", "", MISS, GREEN], [29, 242]),
        (["Wordle 210 X/6", *[MISS] * 6], [29] * 6),
    ],
)
def test_grids(lines, codes):
    assert grid(lines) == codes


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["no game", ""], "no line of tiles"),
        ([f"{MISS} {GREEN}"], "no line of tiles"),
        ([MISS[:-1], GREEN], "a line of more or fewer than five tiles"),
        ([MISS + "🟩", GREEN], "a line of more or fewer than five tiles"),
        ([MISS, GREEN, "", MISS, GREEN], "several grids"),
        ([MISS] * 7, "more than six guesses"),
        ([GREEN, MISS], "guesses after the solution"),
        ([MISS, MISS], "unfinished"),
        (["Wordle 210 3/6", f"{MISS} ouch", MISS, GREEN], "rows that do not match the score"),
        ([f"Wordle 210 3/6 {MISS}", MISS, GREEN], "rows that do not match the score"),
        (["Wordle 210 2/6", MISS, MISS, GREEN], "rows that do not match the score"),
        (["Wordle 210 X/6", *[MISS] * 5, GREEN], "rows that do not match the score"),
        (["Wordle 210 6/6", *[MISS] * 6], "rows that do not match the score"),
    ],
)
def test_reasons(lines, reason):
    assert grid(lines) == reason


def test_unfinished_games_can_be_kept():
    assert grid([MISS, MISS], keep_unfinished=True) == [29, 29]
    cut_off = ["Wordle 210 4/6", MISS, MISS]
    assert grid(cut_off, keep_unfinished=True) == "rows that do not match the score"


def test_a_file_with_header_columns_between_and_every_fault(tmp_path):
    records = [
        ["wordle_id", "tweet_id", "date", "user", "text"],
        ["210", "1", "x", "y", f"Wordle 210 2/6\n\n{MISS}\n{GREEN}"],
        ["211", "2", "x", "y", f"{MISS}\r\n{MISS}"],
        ["999", "3", "x", "y", GREEN],
        ["x", "4", "x", "y", GREEN],
        ["212"],
        [],
        ["213", "5", "x", "y", "no"],
    ]
    tweets = read_tweets(write(tmp_path / "tweets.csv", records))
    assert tweets.games == [("panic", [29, 242])]
    assert tweets.left_out == {
        "unfinished": 1,
        "puzzle without a known answer": 1,
        "no puzzle number": 1,
        "fewer than two columns": 1,
        "an empty line": 1,
        "no line of tiles": 1,
    }
    assert tweets.examples["an empty line"] == [11]  # the first two tweets have four and two lines
    assert tweets.report().splitlines()[:2] == ["1 games, 6 tweets left out", "1: an empty line (line 11)"]
    kept = read_tweets(tmp_path / "tweets.csv", unfinished="keep", answers={210: "crane", 211: "slate"})
    assert kept.games == [("crane", [29, 242]), ("slate", [29, 29])]


@pytest.mark.parametrize("others", [1, 20_000])
def test_a_quote_that_is_never_closed_costs_its_own_tweet(tmp_path, others):
    """Also where the rest of the file is longer than a field of a CSV file may be."""
    good = f'210,"Wordle 210 2/6\n\n{MISS}\n{GREEN}"\n'
    path = tmp_path / "tweets.csv"
    path.write_text(f'{good}211,"{MISS}\n{GREEN}\n{good}212,"open\n' + "213,no luck\n" * others, encoding="utf-8")
    tweets = read_tweets(path)
    assert tweets.games == [("panic", [29, 242])] * 2
    assert tweets.left_out == {"quotes that do not match": 2, "no line of tiles": others}
    assert tweets.examples["quotes that do not match"] == [5, 11]
    assert "2: quotes that do not match (line 5, 11)" in tweets.report()


def test_a_longer_table_of_answers(tmp_path):
    (tmp_path / "answers.txt").write_text("300 crane\n\n301,\tslate\n")
    assert load_answers(tmp_path / "answers.txt") == {300: "crane", 301: "slate"}
    path = write(tmp_path / "tweets.csv", [["300", GREEN], ["210", GREEN]])
    tweets = read_tweets(path, answers=tmp_path / "answers.txt")
    assert tweets.games == [("crane", [242])]
    for bad in ("300", "300 crane extra", "x crane", "300 crane\n300 slate"):
        (tmp_path / "bad.txt").write_text(bad)
        with pytest.raises(FileError, match="line"):
            load_answers(tmp_path / "bad.txt")
    (tmp_path / "bad.txt").write_text("300 Crane")
    with pytest.raises(ValueError, match="capital letters"):
        load_answers(tmp_path / "bad.txt")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match=r"not utf-8 .* line 1"):
        read_tweets(write(tmp_path / "a.csv", [["210", "é" + GREEN[:0]]], "latin-1"))
    with pytest.raises(FileError):
        read_tweets(tmp_path / "missing.csv")


def test_the_shipped_file_has_games_and_every_reason():
    tweets = read_tweets(example_tweets())
    assert len(tweets.games) == 48
    assert len(tweets.left_out) == 9
    assert {len(codes) for _, codes in tweets.games} >= {2, 3, 4, 5, 6}
    assert example_tweets().stat().st_size < 10_000


def test_the_papers_puzzles():
    assert (len(PUZZLES), PUZZLES[210], PUZZLES[249]) == (40, "panic", "trove")
    assert len(set(PUZZLES.values()) & set(common_words())) > 30


def test_codes_and_symbols_are_inverse():
    assert SYMBOLS_OF_CODE[29] == "<b><y><b><b><g>"
    assert all(SYMBOLS_OF_CODE[code] == symbols for symbols, code in CODE_OF_SYMBOLS.items())
    assert sorted(CODE_OF_SYMBOLS.values()) == list(range(243))
