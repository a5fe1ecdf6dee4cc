"""Players of scripted words, mixtures of them, and Monte Carlo search."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import games, letters, plain_feedback, turns_of
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.optimal import information_gain
from torchrl_lang.envs.wordle.players import OPENERS
from torchrl_lang.envs.wordle.rules import feedback_table
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.evaluation import play_games
from torchrl_lang.schema import ATTENTION_MASK

WORDS = wordle.demo_words(150)


def rows_of(words):
    env, player = wordle.WordleEnv(words, batch_size=[64]), wordle.RandomWordPlayer(words, seed=1)
    return play_games(env, player, games=64, seed=0).rows


def test_repeat_player_draws_among_different_guesses():
    env = wordle.WordleEnv(["fuzzy"], batch_size=[2000], seed=0)
    td = env.reset()
    for _ in range(2):
        td = env.step(wordle.RandomWordPlayer(WORDS, seed=int(td[ATTENTION_MASK].sum()))(td))["next"]
    turns = turns_of_rows(td)
    guess = wordle.RepeatPlayer(WORDS, seed=0)(td)["action"][:, None, :5]
    share = (guess == turns.guess[:, :2]).all(-1).double().mean(0)
    assert (share.sum() - 1).abs() < 0.05
    assert ((share - 0.5).abs() < 0.06).all()


def test_openers():
    assert len(OPENERS) == 28
    player = wordle.RandomWordPlayer(WORDS, openers=OPENERS, seed=0)
    _, guesses = games(player, turns=2)
    opening = (guesses[0][:, None] == letters(*OPENERS)).all(-1)
    assert opening.any(-1).all()
    assert opening.any(0).all()
    assert (player.index.find(guesses[1]) >= 0).all()


def test_probabilities_of_start_words():
    player = wordle.StartWordPlayer(["crane", "slate", "point"], starts=["stare", "crate"], seed=0)
    words = ["crane", "slate", "point", "stare", "crate", "fuzzy"]
    turns = turns_of([], [("stare", "crate")], [("stare", "point")])
    chances = torch.stack([player.probability(turns, letters(word).expand(3, -1)) for word in words], 1)
    assert chances.tolist() == [[0, 0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]


FEW = ["crane", "slate", "point", "crate", "plate", "grate", "tummy"]
PLAYERS = {
    "careless": lambda **options: wordle.RandomWordPlayer(FEW, prob_smart=0.3, **options),
    "wrong": lambda **options: wordle.WrongPlayer(FEW, **options),
}


@pytest.mark.parametrize("openers", [None, ["crane", "fuzzy"]])
@pytest.mark.parametrize("name", PLAYERS)
def test_the_probabilities_of_all_words_sum_to_one(name, openers):
    rows = rows_of(FEW)
    player = PLAYERS[name](openers=openers, seed=0)
    turns = turns_of_rows(rows)
    for turn in range(4):
        each = [player.probability(turns.until(turn), letters(word).expand(64, -1)) for word in [*FEW, "fuzzy"]]
        torch.testing.assert_close(sum(each), torch.ones(64, dtype=torch.float64))
    assert wordle.RandomWordPlayer(["crane"]).log_prob(rows).isneginf().any()
    with pytest.raises(NotImplementedError, match="OptimalPlayer"):
        wordle.OptimalPlayer(FEW).log_prob(rows)


@pytest.mark.parametrize("per", ["move", "game"])
def test_mixture(per):
    players = [wordle.RandomWordPlayer([word]) for word in ("aaaaa", "bbbbb", "ccccc")]
    mixture = wordle.MixturePlayer(players, [0.5, 0.3, 0.2], per=per, seed=0)
    _, guesses = games(mixture, batch=3000)
    who = torch.stack([guess[:, 0] for guess in guesses], 1)
    for turn in range(4):
        share = who[:, turn].bincount(minlength=3) / 3000
        assert torch.allclose(share, torch.tensor([0.5, 0.3, 0.2]), atol=5 * 0.5 / 3000**0.5)
    constant = (who == who[:, :1]).all(-1).double().mean().item()
    assert constant == 1 if per == "game" else abs(constant - (0.5**4 + 0.3**4 + 0.2**4)) < 0.03


def test_mixture_draws_again_where_a_row_is_fresh():
    mixture = wordle.MixturePlayer([wordle.RandomWordPlayer([word]) for word in ("aaaaa", "bbbbb")], per="game", seed=0)
    env = wordle.WordleEnv(["fuzzy"], batch_size=[200], seed=0)
    td = env.step(mixture(env.reset()))["next"]
    first = td["tokens"][:, 1].clone()
    fresh = torch.arange(200) < 100
    td = mixture(env.reset(td.set("_reset", fresh[:, None])))
    second = td["action"][:, 0]
    assert torch.equal(second[100:], first[100:])
    assert 20 < (second[:100] != first[:100]).sum() < 80


def test_probabilities_of_mixtures():
    """Per game the mean of its games' probabilities, per move that of each word's."""
    rows = rows_of(WORDS)
    careful, wrong = wordle.RandomWordPlayer(WORDS, prob_smart=0.3), wordle.WrongPlayer(WORDS)
    mixture = wordle.MixturePlayer([careful, wrong], [0.25, 0.75], per="game")
    expected = (0.25 * careful.log_prob(rows).exp() + 0.75 * wrong.log_prob(rows).exp()).log()
    torch.testing.assert_close(mixture.log_prob(rows), expected)
    with pytest.raises(ValueError, match="log_prob"):
        mixture.probability(None, None)
    mixture = wordle.MixturePlayer(
        [wordle.RandomWordPlayer(WORDS, prob_smart=1.0), wordle.RandomWordPlayer(WORDS)], [0.3, 0.7]
    )
    torch.testing.assert_close(mixture.log_prob(rows), careful.log_prob(rows))


@pytest.mark.parametrize("best", ["abbot", "tribe"])  # before and after the others in the alphabet
def test_the_best_first_guess_of_many_games(best):
    """One of five words splits the others, worked by hand."""
    words = ["baker", "maker", "taker", "waker", best]
    # It separates taker (t), baker (b) and the pair of maker and waker; the others split off only themselves and it.
    player = wordle.MonteCarloPlayer(wordle.RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=500, seed=1)
    chosen = player.choose(turns_of(*[()] * 8))
    assert [wordle.WordIndex.text(guess) for guess in chosen] == [best] * 8


def test_rows_of_a_batch_are_simulated_from_their_own_state():
    words = ["baker", "maker", "taker", "point"]
    player = wordle.MonteCarloPlayer(wordle.RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=20, seed=1)
    words = player.choose(
        turns_of([("baker", "point")], [("point", "taker")], [("point", "maker"), ("baker", "maker")])
    )
    assert [wordle.WordIndex.text(guess) for guess in words[:2]] == ["point", "taker"]  # the t of point is yellow
    assert wordle.WordIndex.text(words[2]) == "maker"


@pytest.mark.parametrize("used", [0, 5])
def test_simulated_games_end_with_the_last_try(used):
    """Invalid guesses have used tries, too."""
    player = wordle.MonteCarloPlayer(wordle.RandomWordPlayer(["crane"]), ["crane", "slate"], seed=1, max_tries=6)
    first, returns = player._simulate(turns_of([None] * used, [None] * used), letters("slate", "crane"))
    assert returns.tolist() == [used - 6, 0]
    assert [wordle.WordIndex.text(guess) for guess in first] == ["crane", "crane"]
    player = wordle.MonteCarloPlayer(wordle.RandomWordPlayer(["crane", "fuzzy"], seed=0), ["crane", "slate"], seed=0)
    impossible = turns_of(*[[("crane", "point")]] * 30)  # the player's own guess is played
    assert {wordle.WordIndex.text(guess) for guess in player.choose(impossible)} == {"crane", "fuzzy"}


LISTS = st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), min_size=1, max_size=14, unique=True)


def exact_gain(sizes: Counter) -> tuple[tuple[int, int], ...]:
    """``prod n^n`` over the group sizes, as prime powers: equal if and only if the information gains are."""
    powers: Counter = Counter()
    for n in sizes.values():
        rest = n
        for prime in (2, 3, 5, 7, 11, 13):
            while rest % prime == 0:
                powers[prime] += n
                rest //= prime
    return tuple(sorted(powers.items()))


@pytest.mark.parametrize("rules", ["official", "ilql"])
@settings(max_examples=60, deadline=None)
@given(words=LISTS, more=st.none() | LISTS, data=st.data())
def test_best_guesses_against_brute_force_with_exact_ties(rules, words, more, data):
    """Among the words that fit, or among all guesses where ``more`` are given."""
    hidden = data.draw(st.sampled_from(words))
    guesses = data.draw(st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), max_size=2))
    history = [(guess, plain_feedback(guess, hidden, rules)) for guess in guesses]
    possible = [w for w in words if all(plain_feedback(guess, w, rules) == answer for guess, answer in history)]
    every = possible if more is None else list(dict.fromkeys([*words, *more]))
    groups = {g: Counter(tuple(plain_feedback(g, w, rules)) for w in possible) for g in every}
    gain = {g: -sum(n / len(possible) * math.log(n / len(possible)) for n in c.values()) for g, c in groups.items()}
    best = exact_gain(groups[max(every, key=gain.__getitem__)])
    ties = [guess for guess in every if exact_gain(groups[guess]) == best]
    expected = possible if len(possible) <= 2 else [guess for guess in ties if guess in possible] or ties
    player = wordle.OptimalPlayer(words, guesses=more, rules=rules, ties="random" if more is None else "first", seed=0)
    turns = turns_of([(guess, hidden) for guess in guesses], rules=rules)
    (found,) = player.best_words(turns)
    names = list(dict.fromkeys([*words, *(more or ())]))
    assert [names[number] for number in found] == expected
    assert player.index.text(player.choose(turns)[0]) in (expected if more is None else expected[:1])


def test_gain_of_many_guesses_is_the_gain_of_each():
    words = letters(*wordle.demo_words(900))  # several chunks
    table = feedback_table(words, words)
    gain = information_gain(table)
    for row in (0, 133, 134, 135, 500, 899):
        share = table[row].to(torch.int64).bincount().double() / 900
        assert gain[row].item() == pytest.approx(-torch.special.xlogy(share, share).sum().item(), abs=1e-12)


def test_where_nothing_is_possible_any_word_is_played():
    (found,) = wordle.OptimalPlayer(["crane", "slate"], seed=0).best_words(turns_of([("crane", "fuzzy")]))
    assert list(found) == [0, 1]
