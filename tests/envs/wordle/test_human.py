"""Refit games have exactly the colours of the tweets, and the authors' JSON is read as it is."""

import csv
import json

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback
from torchrl_lang._files import FileError
from torchrl_lang.envs.wordle import WordIndex, guess_words, random_words
from torchrl_lang.envs.wordle.human import HumanGames, example_tweets, grid, read_tweets
from torchrl_lang.envs.wordle.rules import feedback_code
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.schema import check_row

TWEETS = read_tweets(example_tweets())  # 48 games
WORDS = random_words(150, include=sorted({answer for answer, _ in TWEETS.games}), seed=0)
GUESSES = guess_words()[::3]


def codes_of(rows):
    """The codes of each row's guesses, and its guesses."""
    turns = turns_of_rows(rows)
    codes = feedback_code(turns.colours)
    rows = [(codes[row, :n], turns.guess[row, :n]) for row, n in enumerate(turns.tries.tolist())]
    return [(tuple(heard.tolist()), list(map(WordIndex.text, said))) for heard, said in rows]


@pytest.mark.parametrize("true_word", [False, True])
def test_rows_have_exactly_the_colours_of_a_tweet(true_word):
    rows = HumanGames(TWEETS, WORDS, guesses=GUESSES, true_word=true_word)(range(300), seed=0)
    check_row(rows, vocab_size=35)
    games = {(answer, tuple(codes)) for answer, codes in TWEETS.games}
    played = codes_of(rows)
    assert {codes for codes, _ in played} <= {codes for _, codes in games}
    assert len({codes for codes, _ in played}) > 40
    for codes, guesses in played:
        if codes[-1] == 242:
            assert guesses[-1] in WORDS
            assert not true_word or (guesses[-1], codes) in games
            colours = [plain_feedback(guess, guesses[-1], "official") for guess in guesses]
            assert tuple(feedback_code(torch.tensor(colours)).tolist()) == codes
    assert rows["token_reward"].sum(-1).tolist() == [-(len(codes) - (codes[-1] == 242)) for codes, _ in played]
    assert rows["terminated"].all()


def test_games_that_cannot_be_refit_are_counted_and_drawn_again():
    green_but_yellow = [242 - 1, 242]  # four greens and a yellow: no guess gets them
    human = HumanGames([("crane", green_but_yellow), ("slate", [242])], ["crane", "slate"])
    assert human.impossible() == 1
    assert {codes for codes, _ in codes_of(human(range(50), seed=0))} == {(242,)}
    with pytest.raises(ValueError, match="1 of 1 games have none at all"):
        human.select([0])(range(5), seed=0)
    assert HumanGames([("fuzzy", [242])], ["crane"], true_word=True).impossible() == 1
    assert HumanGames([("fuzzy", [242])], ["crane"]).impossible() == 0


AUTHORS = {
    "games": [["abide", ["<b><b><y><y><y>", "<g><g><g><g><g>"]], ["abide", ["<y><b><b><b><g>"]]],
    "transitions": {
        "abide": {"<b><b><y><y><y>": ["speed"], "<g><g><g><g><g>": ["abide"]},
        "speed": {"<g><g><g><g><g>": ["speed"], "<y><b><b><y><y>": []},
    },
}


def test_the_authors_file_is_read_as_it_is(tmp_path):
    """Its rules are found from the colours: speed for abide is bbyyy in the paper's code and bbyby in the newspaper."""
    path = tmp_path / "tweet_data.json"
    path.write_text(json.dumps(AUTHORS))
    human = HumanGames.read(path)
    assert (human.rules, human.words, sorted(human.guesses)) == ("ilql", ["abide", "speed"], ["abide", "speed"])
    assert human.games == [("abide", [13, 242]), ("abide", [83])]
    assert {codes for codes, _ in codes_of(human.select([0])(range(20), 0))} == {(13, 242)}
    path.write_text(json.dumps({**AUTHORS, "rules": "official"}))
    with pytest.raises(FileError, match="which the rules do not give"):
        HumanGames.read(path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: c.pop("games"), "games"),
        (lambda c: c["games"].append(["abide", ["<x>"]]), "<x>"),
        (lambda c: c["games"].append(["abide", []]), r"games\.2"),
        (lambda c: c.update(transitions={}), "empty"),
        (lambda c: c["transitions"].update(Crane={}), "Crane"),
        (lambda c: c["transitions"]["speed"].update(green=["x"]), "green"),
        (lambda c: c["transitions"]["speed"].update({"<b><b><b><b><b>": ["abide"]}), "the rules do not give"),
        (lambda c: c.update(rules="own"), "rules"),
    ],
)
def test_other_content_is_an_error_with_the_path(tmp_path, change, found):
    content = json.loads(json.dumps(AUTHORS))
    change(content)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=f"bad.json .*{found}"):
        HumanGames.read(tmp_path / "bad.json")


def test_splits_and_the_best_games():
    human = HumanGames(TWEETS, WORDS, guesses=GUESSES)
    train, test = human.split(0.75, seed=0)
    assert (len(train.games), len(test.games)) == (36, 12)
    assert sorted(train.games + test.games) == sorted(human.games)
    assert human.select([3, 1]).games == [human.games[3], human.games[1]]
    best = human.best(0.25)
    lengths = sorted(len(codes) for _, codes in human.games)
    assert sorted(len(codes) for _, codes in best.games) == lengths[:12]
    assert len(codes_of(best(range(20), 0))) == 20
    assert human.best(1.0).games == human.games


GREEN = "🟩🟩🟩🟩🟩"
MISS = "⬛🟨⬛⬛🟩"
MISMATCH = "rows that do not match the score"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([GREEN], [242]),
        (["⬜🟨⬜⬜🟩", "🟧🟧🟧🟧🟧"], [29, 242]),  # the light theme, and high contrast
        (["⬛🟦⬛⬛🟧", GREEN], [29, 242]),
        (["text before", MISS, "  " + GREEN + " ", "text after 🟩"], [29, 242]),
        (["⬛\ufe0f🟨⬛⬛🟩", GREEN], [29, 242]),
        ([MISS] * 5 + [GREEN], [29] * 5 + [242]),
        (["Wordle 210 2/6*", MISS, GREEN, "1/6 yesterday"], [29, 242]),
        (["after 4/6, on 3/6/2022:", "Wordle 1,210 2/6", "", MISS, GREEN], [29, 242]),
        (["Wordle 210 X/6", *[MISS] * 6], [29] * 6),
        ([f"{MISS} {GREEN}"], "no line of tiles"),
        ([MISS + "🟩", GREEN], "a line of more or fewer than five tiles"),
        ([MISS, GREEN, "", MISS, GREEN], "several grids"),
        *(([MISS] * 7, "more than six guesses"), ([GREEN, MISS], "guesses after the solution")),
        ([MISS, MISS], "unfinished"),
        *(([f"Wordle 210 3/6 {MISS}", MISS, GREEN], MISMATCH), (["Wordle 210 6/6", *[MISS] * 6], MISMATCH)),
        (["Wordle 210 X/6", *[MISS] * 5, GREEN], MISMATCH),
    ],
)
def test_grids_and_reasons_why_there_is_none(lines, found):
    assert grid(lines) == found


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
    with (tmp_path / "tweets.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(records)
    tweets = read_tweets(tmp_path / "tweets.csv")
    assert tweets.games == [("panic", [29, 242])]
    reasons = {"unfinished", "puzzle without a known answer", "no puzzle number", "fewer than two columns"}
    assert tweets.left_out.keys() == reasons | {"no line of tiles"}
    assert {len(lines) for lines in tweets.left_out.values()} == {1}
    assert tweets.report().splitlines()[:2] == ["1 games, 5 tweets left out", "1: fewer than two columns (line 10)"]
    answers = tmp_path / "answers.txt"
    answers.write_text("210,\tcrane\n\n211\tslate\n")
    assert read_tweets(tmp_path / "tweets.csv", answers=answers).games == [("crane", [29, 242])]
    answers.write_text("210 crane\n210 slate\n")
    with pytest.raises(FileError, match="line 2"):
        read_tweets(tmp_path / "tweets.csv", answers=answers)


def test_broken_records_are_counted_and_the_next_line_is_read(tmp_path):
    good = f'210,"Wordle 210 2/6\n\n{MISS}\n{GREEN}"\n'
    path = tmp_path / "tweets.csv"
    path.write_bytes(f'{good}211,"a" b\n{good}212,caf\xe9\n'.encode() + b"213,\xe9\n" + f'{good}214,"open\n'.encode())
    tweets = read_tweets(path)
    assert tweets.games == [("panic", [29, 242])] * 3
    faults = {"is no CSV record": [5, 16], "holds a byte that is not utf-8": [11], "no line of tiles": [10]}
    assert tweets.left_out == faults
