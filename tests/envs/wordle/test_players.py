from __future__ import annotations

import copy

import pytest
import torch

from tests.envs.wordle.helpers import games, letters, turns_of
from torchrl_lang.envs.wordle import (
    MixturePlayer,
    OptimalPlayer,
    RandomWordPlayer,
    RepeatPlayer,
    StartWordPlayer,
    WordIndex,
    WordleEnv,
    WrongPlayer,
    demo_words,
)
from torchrl_lang.envs.wordle.players import OPENERS
from torchrl_lang.envs.wordle.transcript import Turns, turns_of_rows
from torchrl_lang.evaluation import play_games
from torchrl_lang.schema import ATTENTION_MASK

WORDS = demo_words(150)


def agrees(player, turns: Turns, guess) -> torch.Tensor:
    """True where a guess on the player's list agrees with all colours of the row."""
    word = player.index.find(guess)
    assert (word >= 0).all()
    return player.sets.members(turns.filter(player.sets)).gather(-1, word[:, None])[:, 0]


def test_random_player_plays_every_word_alike():
    player = RandomWordPlayer(WORDS[:10], seed=0)
    _, guesses = games(player, batch=2000, turns=2)
    for guess in guesses:
        count = player.index.find(guess).bincount(minlength=10)
        assert (count - 200).abs().max() < 5 * 200**0.5


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_smart_guesses_agree_with_the_colours_and_wrong_ones_do_not(rules):
    smart, wrong = RandomWordPlayer(WORDS, prob_smart=1.0, rules=rules, seed=0), WrongPlayer(WORDS, rules=rules, seed=0)
    for before, guess in zip(*games(smart, rules=rules), strict=True):
        possible = smart.sets.size(before.filter(smart.sets)) > 0
        assert agrees(smart, before, guess)[possible].all()
        assert (smart.index.find(guess) >= 0).all()
    for turn, (before, guess) in enumerate(zip(*games(wrong, rules=rules), strict=True)):
        assert agrees(wrong, before, guess).any() == (turn == 0)


@pytest.mark.parametrize("first_n", [1, 2, None])
def test_repeat_player_repeats_its_first_guesses(first_n):
    _, guesses = games(RepeatPlayer(WORDS, first_n=first_n, seed=0), turns=5)
    stacked = torch.stack(guesses, 1)
    allowed = stacked[:, :first_n]
    for turn in range(1, 5):
        match = (stacked[:, turn, None] == allowed[:, :turn]).all(-1)
        assert match.any(-1).all()
    # Guess 2 can only repeat guess 1, so all guesses are one.
    assert (stacked == stacked[:, :1]).all()


def test_repeat_player_draws_among_different_guesses():
    env = WordleEnv(["fuzzy"], batch_size=[2000], seed=0)
    td = env.reset()
    for _ in range(2):
        td = env.step(RandomWordPlayer(WORDS, seed=int(td[ATTENTION_MASK].sum()))(td))["next"]
    turns = turns_of_rows(td)
    guess = RepeatPlayer(WORDS, seed=0)(td)["action"][:, None, :5]
    share = (guess == turns.guess[:, :2]).all(-1).double().mean(0)
    assert (share.sum() - 1).abs() < 0.05
    assert ((share - 0.5).abs() < 0.06).all()


def test_openers():
    assert len(OPENERS) == 28
    player = RandomWordPlayer(WORDS, openers=OPENERS, seed=0)
    _, guesses = games(player, turns=2)
    opening = (guesses[0][:, None] == letters(*OPENERS)).all(-1)
    assert opening.any(-1).all()
    assert opening.any(0).all()
    assert (player.index.find(guesses[1]) >= 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: RandomWordPlayer(WORDS, prob_smart=0.5, seed=seed),
        lambda seed: WrongPlayer(WORDS, seed=seed),
        lambda seed: RepeatPlayer(WORDS, seed=seed),
        lambda seed: MixturePlayer([RandomWordPlayer(WORDS, seed=seed), WrongPlayer(WORDS, seed=seed)], seed=seed),
    ],
)
def test_own_random_stream(make):
    def played(player):
        return torch.stack(games(player, batch=50, turns=2)[1])

    state = torch.get_rng_state()
    first = played(make(3))
    assert torch.equal(first, played(make(3)))
    assert not torch.equal(first, played(make(4)))
    assert not torch.equal(played(make(None)), played(make(None)))
    assert torch.equal(torch.get_rng_state(), state)
    # A copy goes on with the same numbers if there is a seed, with new ones if not.
    player = make(3)
    played(player)
    assert torch.equal(played(copy.deepcopy(player)), played(player))
    player = make(None)
    assert not torch.equal(played(copy.deepcopy(player)), played(player))


def test_rows_without_any_possible_word_get_some_word():
    env = WordleEnv(["fuzzy"], batch_size=[50], seed=0)
    td = env.reset()
    player = RandomWordPlayer(["crane", "slate"], prob_smart=1.0, seed=0)
    for _ in range(3):
        td = env.step(player(td))["next"]
    assert (td["token_reward"].sum(-1) == -3).all()
    nothing_wrong = WrongPlayer(["crane"], seed=0)
    assert nothing_wrong(env.reset())["action"].shape == (50, 6)


def test_probabilities_of_start_words():
    player = StartWordPlayer(["crane", "slate", "point"], starts=["stare", "crate"], seed=0)
    words = ["crane", "slate", "point", "stare", "crate", "fuzzy"]
    turns = turns_of([], [("stare", "crate")], [("stare", "point")])
    chances = torch.stack([player.probability(turns, letters(word).expand(3, -1)) for word in words], 1)
    assert chances.tolist() == [[0, 0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]


FEW = ["crane", "slate", "point", "crate", "plate", "grate", "tummy"]
PLAYERS = {
    "careful": lambda **options: RandomWordPlayer(FEW, prob_smart=1.0, **options),
    "careless": lambda **options: RandomWordPlayer(FEW, prob_smart=0.3, **options),
    "wrong": lambda **options: WrongPlayer(FEW, **options),
}


def played(player, n=64, seed=0):
    return play_games(WordleEnv(FEW, batch_size=[n]), player, games=n, seed=seed).rows


@pytest.mark.parametrize("openers", [None, ["crane", "fuzzy"]])
@pytest.mark.parametrize("name", PLAYERS)
def test_the_probabilities_of_all_words_sum_to_one(name, openers):
    rows = played(RandomWordPlayer(FEW, seed=1))
    player = PLAYERS[name](openers=openers, seed=0)
    turns = turns_of_rows(rows)
    letters = WordIndex([*FEW, "fuzzy"]).letters
    for turn in range(4):
        before = turns.until(turn)
        total = sum(player.probability(before, word.expand(len(rows), -1)) for word in letters)
        torch.testing.assert_close(total, torch.ones_like(total))


def test_impossible_words_and_unknown_probabilities():
    rows = played(RandomWordPlayer(FEW, seed=1))
    assert RandomWordPlayer(["crane"]).log_prob(rows).isneginf().any()
    for player in (RepeatPlayer(FEW), OptimalPlayer(FEW)):
        with pytest.raises(NotImplementedError, match=type(player).__name__):
            player.log_prob(rows)


@pytest.mark.parametrize(
    ("make", "noun"),
    [
        (lambda: RandomWordPlayer(WORDS, prob_smart=1.5), "prob_smart"),
        (lambda: RepeatPlayer(WORDS, first_n=0), "first_n"),
        (lambda: WrongPlayer(WORDS, action_length=5), "action_length"),
        (lambda: WrongPlayer(WORDS, rules="mine"), "rules"),
        (lambda: WrongPlayer(WORDS, openers=["Crane"]), "Crane"),
    ],
)
def test_options_out_of_range(make, noun):
    with pytest.raises(ValueError, match=noun):
        make()
