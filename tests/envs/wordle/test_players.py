import pytest
import torch

from tests.envs.wordle.helpers import games, letters, turns_of
from torchrl_lang.envs.wordle import (
    OptimalPlayer,
    RandomWordPlayer,
    RepeatPlayer,
    StartWordPlayer,
    WordleEnv,
    WrongPlayer,
    demo_words,
)
from torchrl_lang.envs.wordle.players import OPENERS
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.evaluation import play_games
from torchrl_lang.schema import ATTENTION_MASK

WORDS = demo_words(150)


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


def test_probabilities_of_start_words():
    player = StartWordPlayer(["crane", "slate", "point"], starts=["stare", "crate"], seed=0)
    words = ["crane", "slate", "point", "stare", "crate", "fuzzy"]
    turns = turns_of([], [("stare", "crate")], [("stare", "point")])
    chances = torch.stack([player.probability(turns, letters(word).expand(3, -1)) for word in words], 1)
    assert chances.tolist() == [[0, 0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]


FEW = ["crane", "slate", "point", "crate", "plate", "grate", "tummy"]
PLAYERS = {
    "careless": lambda **options: RandomWordPlayer(FEW, prob_smart=0.3, **options),
    "wrong": lambda **options: WrongPlayer(FEW, **options),
}


@pytest.mark.parametrize("openers", [None, ["crane", "fuzzy"]])
@pytest.mark.parametrize("name", PLAYERS)
def test_the_probabilities_of_all_words_sum_to_one(name, openers):
    rows = play_games(WordleEnv(FEW, batch_size=[64]), RandomWordPlayer(FEW, seed=1), games=64, seed=0).rows
    player = PLAYERS[name](openers=openers, seed=0)
    turns = turns_of_rows(rows)
    for turn in range(4):
        each = [player.probability(turns.until(turn), letters(word).expand(64, -1)) for word in [*FEW, "fuzzy"]]
        torch.testing.assert_close(sum(each), torch.ones(64, dtype=torch.float64))
    assert RandomWordPlayer(["crane"]).log_prob(rows).isneginf().any()
    with pytest.raises(NotImplementedError, match="OptimalPlayer"):
        OptimalPlayer(FEW).log_prob(rows)
