"""Refit games have exactly the colours of the tweets, and the authors' JSON is read as it is."""

from __future__ import annotations

import json

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback
from torchrl_lang._files import FileError
from torchrl_lang.data import FreshGames, generate_in_parts
from torchrl_lang.envs.wordle import (
    HumanGames,
    WordIndex,
    example_tweets,
    feedback_code,
    guess_words,
    random_words,
    read_turns,
    read_tweets,
)
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.schema import check_row

TWEETS = read_tweets(example_tweets())
WORDS = random_words(150, include=sorted({answer for answer, _ in TWEETS.games}), seed=0)
GUESSES = guess_words()[::3]


def codes_of(rows):
    """The codes of each row's guesses, and its guesses."""
    turns = read_turns(rows["tokens"], rows["attention_mask"], rows["agent_mask"])
    codes = feedback_code(turns.colours)
    return [
        (tuple(codes[row, :n].tolist()), [WordIndex.text(guess) for guess in turns.guess[row, :n]])
        for row, n in enumerate(turns.tries.tolist())
    ]


@pytest.mark.parametrize("true_word", [False, True])
def test_rows_have_exactly_the_colours_of_a_tweet(true_word):
    human = HumanGames(TWEETS, WORDS, guesses=GUESSES, true_word=true_word)
    rows = human(range(300), seed=0)
    check_row(rows, vocab_size=35)
    games = {tuple(codes): answer for answer, codes in TWEETS.games}
    seen = set()
    for codes, guesses in codes_of(rows):
        assert codes in games
        seen.add(codes)
        if codes[-1] == 242:
            hidden = guesses[-1]
            assert hidden in WORDS
            if true_word:
                assert hidden in {answer for answer, other in TWEETS.games if tuple(other) == codes}
            for code, guess in zip(codes, guesses, strict=True):
                colours = plain_feedback(guess, hidden, "official")
                assert sum(colour * 3 ** (4 - place) for place, colour in enumerate(colours)) == code
    assert len(seen) > 40
    returns = rows["token_reward"].sum(-1).tolist()
    assert returns == [-(len(codes) - (codes[-1] == 242)) for codes, _ in codes_of(rows)]
    assert rows["terminated"].all()


def test_guesses_are_uniform_among_those_with_the_colours():
    words = ["crane", "crate", "slate", "point", "plate"]
    human = HumanGames([("crane", [242 - 6, 242])], words, guesses=["crave", "brace"])
    table = {
        word: [g for g in human.guesses if plain_feedback(g, word, "official") == [2, 2, 2, 0, 2]] for word in words
    }
    fitting = [word for word in words if table[word]]
    assert fitting == ["crane", "crate"]
    found = [guesses for _, guesses in codes_of(human(range(4000), seed=1))]
    for word in fitting:
        mine = [first for first, last in found if last == word]
        assert abs(len(mine) / 4000 - 1 / len(fitting)) < 0.05
        for guess in table[word]:
            assert abs(mine.count(guess) / len(mine) - 1 / len(table[word])) < 0.06


def test_games_that_cannot_be_refit_are_counted_and_drawn_again():
    green_but_yellow = [242 - 1, 242]  # four greens and a yellow: no guess gets them
    human = HumanGames([("crane", green_but_yellow), ("slate", [242])], ["crane", "slate"])
    assert human.impossible() == 1
    assert {codes for codes, _ in codes_of(human(range(50), seed=0))} == {(242,)}
    with pytest.raises(ValueError, match="1 of 1 games have none at all"):
        human.select([0])(range(5), seed=0)
    absent = HumanGames([("fuzzy", [242])], ["crane"], true_word=True)
    assert absent.impossible() == 1
    with pytest.raises(ValueError, match="1 of 1 games"):
        absent(range(5), seed=0)
    assert HumanGames([("fuzzy", [242])], ["crane"]).impossible() == 0


def test_unfinished_games_are_truncated():
    rows = HumanGames([("crane", [0, 0])], ["crane", "fuzzy", "tulip"])(range(10), seed=0)
    assert rows["truncated"].all()
    assert not rows["terminated"].any()
    assert not (rows["tokens"] == 34).any()


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_json_round_trip(tmp_path, rules):
    human = HumanGames(TWEETS, WORDS[:40], guesses=GUESSES[:200], rules=rules)
    human.write(tmp_path / "human.json")
    read = HumanGames.read(tmp_path / "human.json")
    assert (read.games, read.words, read.rules) == (human.games, human.words, rules)
    assert set(read.guesses) == set(human.guesses)
    order = [human.guesses.index(guess) for guess in read.guesses]
    assert torch.equal(read._table, human._table[:, order])
    assert {codes for codes, _ in codes_of(read(range(50), 0))} <= {tuple(codes) for _, codes in TWEETS.games}
    content = json.loads((tmp_path / "human.json").read_text())
    guesses = [
        guess for by_colours in content["transitions"].values() for each in by_colours.values() for guess in each
    ]
    assert len(guesses) == 40 * len(human.guesses)


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
    with pytest.raises(FileError, match="which the rules do not give"):
        HumanGames.read(path, rules="official")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda c: c.pop("games"), 'no "games"'),
        (lambda c: c.update(games={}), "expected list"),
        (lambda c: c["games"].append(["abide", ["<x>"]]), "as game 2"),
        (lambda c: c["games"].append(["abide", []]), "as game 2"),
        (lambda c: c["games"].append("abide"), "as game 2"),
        (lambda c: c.update(transitions={}), "bad word"),
        (lambda c: c["transitions"].update(Crane={}), "capital letters"),
        (lambda c: c["transitions"]["speed"].update(green=["x"]), "the colours 'green'"),
        (lambda c: c["transitions"]["speed"].update({"<b><b><b><b><b>": [["x"]]}), "expected str"),
        (lambda c: c["transitions"]["speed"].update({"<b><b><b><b><b>": ["abide"]}), "the rules do not give"),
        (lambda c: c.update(rules="own"), 'as "rules"'),
    ],
)
def test_other_content_is_an_error_with_the_path(tmp_path, change, found):
    content = json.loads(json.dumps(AUTHORS))
    change(content)
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=found) as caught:
        HumanGames.read(tmp_path / "bad.json")
    assert "bad.json" in str(caught.value)


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
    for bad in ([48], [-1]):
        with pytest.raises(ValueError, match="There are 48 games"):
            human.select(bad)
    for fraction in (0.0, 1.0):
        with pytest.raises(ValueError, match="one side of the split"):
            human.split(fraction)
    for fraction in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            human.best(fraction)
    with pytest.raises(ValueError, match="less than one game"):
        human.best(0.01)
    assert human.best(1.0).games == human.games


def test_games_that_were_given_up_are_the_worst():
    lost, given_up, solved, quick = ("crane", [0] * 6), ("crane", [0]), ("crane", [0] * 5 + [242]), ("crane", [242])
    human = HumanGames([lost, given_up, solved, quick], ["crane", "fuzzy"])
    assert human.best(0.25).games == [quick]
    assert human.best(0.5).games == [solved, quick]
    assert human.best(0.75).games == [given_up, solved, quick]


def test_a_dataset_and_fresh_rows_of_them(tmp_path):
    human = HumanGames(TWEETS, WORDS, guesses=GUESSES)
    dataset = generate_in_parts(human, tmp_path / "data", games=100, games_per_part=64, progress=False)
    assert len(dataset) == 100
    assert open_dataset(tmp_path / "data")[1].words == tuple(WORDS)
    assert (dataset[:64] == human(range(64), 0)).all()
    assert FreshGames(human, 32, games=64).sample().shape == (32,)


def test_other_games_do_not_continue_an_interrupted_call(tmp_path, monkeypatch):
    """Two halves of the tweets have as many games."""
    train, test = HumanGames(TWEETS, WORDS, guesses=GUESSES).split(0.5, seed=0)
    options = {"games": 40, "games_per_part": 20, "progress": False}

    def stop(self, numbers, seed):
        if numbers.start:
            raise KeyboardInterrupt
        return made(self, numbers, seed)

    made = HumanGames.__call__
    monkeypatch.setattr(HumanGames, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        generate_in_parts(train, tmp_path / "data", **options)
    monkeypatch.setattr(HumanGames, "__call__", made)
    with pytest.raises(ValueError, match="with other arguments \\(notes\\)"):
        generate_in_parts(test, tmp_path / "data", **options)
    assert len(generate_in_parts(train, tmp_path / "data", **options)) == 40


def test_the_notes_change_with_every_game_and_guess():
    human = HumanGames(TWEETS, WORDS, guesses=GUESSES)
    others = [
        HumanGames(TWEETS.games[::-1], WORDS, guesses=GUESSES),
        HumanGames(TWEETS, WORDS, guesses=[*GUESSES[1:], "zzzzz"]),
        HumanGames(
            TWEETS, WORDS, guesses=human.guesses, table=human._table.clone().index_fill_(1, torch.tensor(0), 255)
        ),
    ]
    assert human.notes() == HumanGames(TWEETS, WORDS, guesses=GUESSES).notes()
    assert len({other.notes()["human_digest"] for other in [human, *others]}) == 4
    assert len({(other.notes()["human_games"], other.notes()["guesses"]) for other in [human, *others]}) == 1


def test_wrong_games_and_tables():
    for codes in ([], [0] * 7, [243], [-1]):
        with pytest.raises(ValueError, match="1 to 6 codes from 0 to 242"):
            HumanGames([("crane", codes)], ["crane"])
    with pytest.raises(ValueError, match="table must be uint8"):
        HumanGames([("crane", [242])], ["crane"], table=torch.zeros(2, 2))
