"""A compiled rollout is TorchRL's rollout."""

import pytest
import torch

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import CompiledRollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
from torchrl_lang.envs.wordle import MixturePlayer, RandomWordPlayer, WrongPlayer

from .conftest import WORDS, wordle_env


def wordle_player():
    players = [RandomWordPlayer(WORDS, prob_smart=0.5, seed=1), WrongPlayer(WORDS, seed=2)]
    return MixturePlayer(players, per="game", seed=3)


def corridor_player():
    return CorridorPlayer(CorridorEnv().tokenizer, 4, seed=0)


CASES = {
    "wordle": (wordle_env, wordle_player, {"group_size": 4}),
    "wordle_with_sets": (wordle_env, wordle_player, {"consistent": "packed", "guesses": "words"}),
    "corridor": (CorridorEnv, corridor_player, {}),
    "corridor_at_random": (CorridorEnv, lambda: None, {}),
}


TURNS = ("action", *(("next", key) for key in ("reward", "done", "terminated", "truncated")))
KEEPS = {
    "steps": lambda one: one,
    "rows": lambda one: rows_from_rollout(one, unfinished="drop"),
    "turns": lambda one: one.select(*TURNS),
}


@pytest.mark.parametrize(
    ("case", "batch_size", "keep"),
    [("corridor", [], "steps"), ("wordle_with_sets", [5], "steps")]
    + [("wordle", [2, 3], "rows"), ("corridor_at_random", [4], "turns")],
)
def test_it_equals_the_rollout_of_torchrl(case, batch_size, keep):
    """Twice, from the same seeds."""
    torch.compiler.reset()
    make, make_player, options = CASES[case]
    env, player = make(batch_size=batch_size, seed=5, **options), make_player()
    torch.manual_seed(0)
    plain = [env.rollout(14, player, break_when_any_done=False) for _ in range(2)]
    again = make(batch_size=batch_size, seed=5, **options)
    play = CompiledRollout(again, make_player(), 14, keep=keep, backend="eager")
    torch.manual_seed(0)
    assert plain[0]["next", "done"].any()
    for one in plain:
        expected, other = KEEPS[keep](one), play()
        assert (expected.batch_size, expected.names) == (other.batch_size, other.names)
        assert set(expected.keys(True, True)) == set(other.keys(True, True))
        for key in expected.keys(True, True):
            assert expected[key].dtype == other[key].dtype, key
            assert torch.equal(expected[key], other[key]), key
