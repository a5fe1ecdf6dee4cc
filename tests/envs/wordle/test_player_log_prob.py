"""The log-probability of scripted players' games: sums to one over words, and the entropy of what they play."""

import math

import pytest
import torch

from torchrl_lang.envs.wordle import (
    MixturePlayer,
    OptimalPlayer,
    RandomWordPlayer,
    RepeatPlayer,
    WordIndex,
    WordleEnv,
    WrongPlayer,
    read_turns,
)
from torchrl_lang.evaluation import play_games

WORDS = ["crane", "slate", "point", "crate", "plate", "grate", "tummy"]
PLAYERS = {
    "careful": lambda **options: RandomWordPlayer(WORDS, prob_smart=1.0, **options),
    "careless": lambda **options: RandomWordPlayer(WORDS, prob_smart=0.3, **options),
    "wrong": lambda **options: WrongPlayer(WORDS, **options),
}


def games(player, n=64, seed=0):
    return play_games(WordleEnv(WORDS, batch_size=[n]), player, games=n, seed=seed).rows


@pytest.mark.parametrize("openers", [None, ["crane", "fuzzy"]])
@pytest.mark.parametrize("name", PLAYERS)
def test_the_probabilities_of_all_words_sum_to_one(name, openers):
    rows = games(RandomWordPlayer(WORDS, seed=1))
    player = PLAYERS[name](openers=openers, seed=0)
    turns = read_turns(rows["tokens"], rows["attention_mask"], rows["agent_mask"])
    letters = WordIndex([*WORDS, "fuzzy"]).letters
    for turn in range(4):
        before = turns.until(turn)
        total = sum(player.probability(before, word.expand(len(rows), -1)) for word in letters)
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("name", PLAYERS)
def test_frequencies_are_the_probabilities(name):
    """The second word of games with the same first word and colours, against its probability."""
    n = 20_000
    rows = games(PLAYERS[name](openers=["tummy"], seed=3), n)
    turns = read_turns(rows["tokens"], rows["attention_mask"], rows["agent_mask"])
    same = (turns.colours[:, 0] == 0).all(-1) & (turns.answered > 1)  # no letter of tummy
    turns = turns.rows(same)
    player = PLAYERS[name](openers=["tummy"])
    for word in WordIndex(WORDS).letters:
        expected = player.probability(turns.until(1), word.expand(int(same.sum()), -1))
        found = (turns.guess[:, 1] == word).all(-1).double().mean()
        assert expected.unique().numel() == 1
        assert abs(float(found - expected[0])) < 4 * math.sqrt(0.25 / int(same.sum()))


def test_one_game_by_hand():
    """First any of seven words, then one of those that fit: log 1/7 + log 1/2 or the like."""
    rows = games(RandomWordPlayer(WORDS, prob_smart=1.0, seed=0), 32)
    turns = read_turns(rows["tokens"], rows["attention_mask"], rows["agent_mask"])
    player = RandomWordPlayer(WORDS, prob_smart=1.0)
    sizes = [player.sets.size(turns.until(turn).filter(player.sets)) for turn in range(6)]
    for row in range(32):
        expected = -sum(math.log(int(sizes[turn][row])) for turn in range(int(turns.answered[row])))
        assert float(player.log_prob(rows)[row]) == pytest.approx(expected)


def test_a_mixture_per_game_is_the_mean_of_its_games_probabilities():
    rows = games(RandomWordPlayer(WORDS, seed=1))
    careful, wrong = PLAYERS["careless"](), PLAYERS["wrong"]()
    mixture = MixturePlayer([careful, wrong], [0.25, 0.75], per="game")
    expected = (0.25 * careful.log_prob(rows).exp() + 0.75 * wrong.log_prob(rows).exp()).log()
    torch.testing.assert_close(mixture.log_prob(rows), expected)
    with pytest.raises(ValueError, match="log_prob"):
        mixture.probability(None, None)


def test_a_mixture_per_move_mixes_each_word():
    rows = games(RandomWordPlayer(WORDS, seed=1))
    careless = MixturePlayer([PLAYERS["careful"](), RandomWordPlayer(WORDS)], [0.3, 0.7])
    torch.testing.assert_close(careless.log_prob(rows), PLAYERS["careless"]().log_prob(rows))


def test_impossible_words_and_unknown_probabilities():
    rows = games(RandomWordPlayer(WORDS, seed=1))
    assert RandomWordPlayer(["crane"]).log_prob(rows).isneginf().any()
    for player in (RepeatPlayer(WORDS), OptimalPlayer(WORDS)):
        with pytest.raises(NotImplementedError, match=type(player).__name__):
            player.log_prob(rows)
