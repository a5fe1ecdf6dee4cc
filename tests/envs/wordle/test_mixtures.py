"""Players made of other players: mixtures by move or by game, and Monte Carlo search."""

import pytest
import torch

from tests.envs.wordle.helpers import games, letters, turns_of
from torchrl_lang.envs.wordle import (
    MixturePlayer,
    MonteCarloPlayer,
    RandomWordPlayer,
    WordIndex,
    WordleEnv,
    WrongPlayer,
    demo_words,
)
from torchrl_lang.evaluation import play_games

WORDS = demo_words(30)


@pytest.mark.parametrize("per", ["move", "game"])
def test_mixture(per):
    players = [RandomWordPlayer([word]) for word in ("aaaaa", "bbbbb", "ccccc")]
    mixture = MixturePlayer(players, [0.5, 0.3, 0.2], per=per, seed=0)
    _, guesses = games(mixture, batch=3000)
    who = torch.stack([guess[:, 0] for guess in guesses], 1)
    for turn in range(4):
        share = who[:, turn].bincount(minlength=3) / 3000
        assert torch.allclose(share, torch.tensor([0.5, 0.3, 0.2]), atol=5 * 0.5 / 3000**0.5)
    constant = (who == who[:, :1]).all(-1).double().mean().item()
    assert constant == 1 if per == "game" else abs(constant - (0.5**4 + 0.3**4 + 0.2**4)) < 0.03


def test_mixture_draws_again_where_a_row_is_fresh():
    mixture = MixturePlayer([RandomWordPlayer([word]) for word in ("aaaaa", "bbbbb")], per="game", seed=0)
    env = WordleEnv(["fuzzy"], batch_size=[200], seed=0)
    td = env.step(mixture(env.reset()))["next"]
    first = td["tokens"][:, 1].clone()
    fresh = torch.arange(200) < 100
    td = mixture(env.reset(td.set("_reset", fresh[:, None])))
    second = td["action"][:, 0]
    assert torch.equal(second[100:], first[100:])
    assert 20 < (second[:100] != first[:100]).sum() < 80


def test_probabilities_of_mixtures():
    """Per game the mean of its games' probabilities, per move that of each word's."""
    rows = play_games(WordleEnv(WORDS, batch_size=[64]), RandomWordPlayer(WORDS, seed=1), games=64, seed=0).rows
    careful, wrong = RandomWordPlayer(WORDS, prob_smart=0.3), WrongPlayer(WORDS)
    mixture = MixturePlayer([careful, wrong], [0.25, 0.75], per="game")
    expected = (0.25 * careful.log_prob(rows).exp() + 0.75 * wrong.log_prob(rows).exp()).log()
    torch.testing.assert_close(mixture.log_prob(rows), expected)
    with pytest.raises(ValueError, match="log_prob"):
        mixture.probability(None, None)
    mixture = MixturePlayer([RandomWordPlayer(WORDS, prob_smart=1.0), RandomWordPlayer(WORDS)], [0.3, 0.7])
    torch.testing.assert_close(mixture.log_prob(rows), careful.log_prob(rows))


@pytest.mark.parametrize("best", ["abbot", "tribe"])  # before and after the others in the alphabet
def test_the_best_first_guess_of_many_games(best):
    """One of five words splits the others, worked by hand."""
    words = ["baker", "maker", "taker", "waker", best]
    # It separates taker (t), baker (b) and the pair of maker and waker; the others split off only themselves and it.
    player = MonteCarloPlayer(RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=500, seed=1)
    chosen = player.choose(turns_of(*[()] * 8))
    assert [WordIndex.text(guess) for guess in chosen] == [best] * 8


def test_rows_of_a_batch_are_simulated_from_their_own_state():
    words = ["baker", "maker", "taker", "point"]
    player = MonteCarloPlayer(RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=20, seed=1)
    chosen = player.choose(
        turns_of([("baker", "point")], [("point", "taker")], [("point", "maker"), ("baker", "maker")])
    )
    assert [WordIndex.text(guess) for guess in chosen[:2]] == ["point", "taker"]  # the t of point is yellow
    assert WordIndex.text(chosen[2]) == "maker"


@pytest.mark.parametrize("used", [0, 5])
def test_simulated_games_end_with_the_last_try(used):
    """Invalid guesses have used tries, too."""
    player = MonteCarloPlayer(RandomWordPlayer(["crane"]), ["crane", "slate"], seed=1, max_tries=6)
    first, returns = player._simulate(turns_of([None] * used, [None] * used), letters("slate", "crane"))
    assert returns.tolist() == [used - 6, 0]
    assert [WordIndex.text(guess) for guess in first] == ["crane", "crane"]
    player = MonteCarloPlayer(RandomWordPlayer(["crane", "fuzzy"], seed=0), ["crane", "slate"], seed=0)
    impossible = turns_of(*[[("crane", "point")]] * 30)  # the player's own guess is played
    assert {WordIndex.text(guess) for guess in player.choose(impossible)} == {"crane", "fuzzy"}
