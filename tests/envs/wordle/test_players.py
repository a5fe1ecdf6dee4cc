from __future__ import annotations

import copy

import pytest
import torch

from tests.envs.wordle.helpers import letters
from torchrl_lang.envs.wordle import (
    OPENERS,
    MixturePlayer,
    RandomWordPlayer,
    RepeatPlayer,
    Turns,
    WordleEnv,
    WrongPlayer,
    demo_words,
    read_turns,
)
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS

WORDS = demo_words(150)


def games(player, batch: int = 400, turns: int = 4, seed: int = 0, rules: str = "official"):
    """The rows before each move and the guesses, [turn][N]; the hidden word is on no list, so that no game ends."""
    env = WordleEnv(["fuzzy"], batch_size=[batch], seed=seed, rules=rules)
    td, before, guesses = env.reset(), [], []
    for _ in range(turns):
        before.append(read_turns(td[TOKENS], td[ATTENTION_MASK], td[AGENT_MASK]))
        td = player(td)
        guesses.append(td["action"][:, :5])
        assert (td["action"][:, 5] == 30).all()
        td = env.step(td)["next"]
    return before, guesses


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


def test_half_smart_player_is_smart_half_of_the_time():
    player = RandomWordPlayer(WORDS, prob_smart=0.5, seed=0)
    env = WordleEnv(WORDS, batch_size=[2000], seed=0)
    td = env.step(RandomWordPlayer(WORDS, seed=1)(env.reset()))["next"]
    turns = read_turns(td[TOKENS], td[ATTENTION_MASK], td[AGENT_MASK])
    share = agrees(player, turns, player(td)["action"][:, :5]).double().mean()
    chance = (player.sets.size(turns.filter(player.sets)) / len(WORDS)).mean()
    assert abs(share - (0.5 + 0.5 * chance)) < 5 * 0.5 / 2000**0.5


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
    turns = read_turns(td[TOKENS], td[ATTENTION_MASK], td[AGENT_MASK])
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


def test_players_take_any_batch_shape_and_longer_actions():
    env = WordleEnv(WORDS, batch_size=[2, 3], action_length=9, seed=0)
    td = env.rollout(3, RandomWordPlayer(WORDS, action_length=9, seed=0), break_when_any_done=False)
    assert td["action"].shape == (2, 3, 3, 9)
    assert (td["action"][..., 6:] == 29).all()
    assert (td["next", "tokens"][:, :, 0, 6] == 30).all()


def test_rows_without_any_possible_word_get_some_word():
    env = WordleEnv(["fuzzy"], batch_size=[50], seed=0)
    td = env.reset()
    player = RandomWordPlayer(["crane", "slate"], prob_smart=1.0, seed=0)
    for _ in range(3):
        td = env.step(player(td))["next"]
    assert (td["token_reward"].sum(-1) == -3).all()
    nothing_wrong = WrongPlayer(["crane"], seed=0)
    assert nothing_wrong(env.reset())["action"].shape == (50, 6)


def test_errors():
    one = RandomWordPlayer(WORDS)
    for make, message in (
        (lambda: RandomWordPlayer(WORDS, prob_smart=1.5), "prob_smart"),
        (lambda: RepeatPlayer(WORDS, first_n=0), "first_n"),
        (lambda: WrongPlayer(WORDS, action_length=5), "action_length must be at least 6"),
        (lambda: WrongPlayer(WORDS, rules="mine"), "rules"),
        (lambda: WrongPlayer(WORDS, openers=["Crane"]), "capital"),
        (lambda: MixturePlayer([one, one], [0.5, 0.6]), "sum to one"),
        (lambda: MixturePlayer([one, one], [1.0]), "2 players"),
        (lambda: MixturePlayer([one, one], [1.5, -0.5]), "sum to one"),
        (lambda: MixturePlayer([one, one], [float("nan"), 1.0]), "sum to one"),
        (lambda: MixturePlayer([one, one], [1.0, float("nan")]), "sum to one"),
        (lambda: MixturePlayer([one], per="turn"), "per='turn'"),
        (lambda: MixturePlayer([one, RandomWordPlayer(WORDS, action_length=8)]), r"\[6, 8\]"),
        (lambda: MixturePlayer([]), "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
