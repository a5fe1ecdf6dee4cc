"""A compiled rollout is TorchRL's rollout."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.envs.conftest import WORDS, wordle_env
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import CompiledRollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
from torchrl_lang.envs.wordle import MixturePlayer, RandomWordPlayer, WrongPlayer


def wordle_player():
    players = [RandomWordPlayer(WORDS, prob_smart=0.5, seed=1), WrongPlayer(WORDS, seed=2)]
    return MixturePlayer(players, per="game", seed=3)


def corridor_player():
    return CorridorPlayer(CorridorEnv().tokenizer, 4, seed=0)


CASES = {
    "wordle": (partial(wordle_env, seed=5), wordle_player),
    "wordle_with_sets": (partial(wordle_env, seed=5, consistent=True, guesses="words"), wordle_player),
    "wordle_with_packed_sets": (partial(wordle_env, seed=5, consistent="packed", rules="ilql"), lambda: None),
    "corridor": (partial(CorridorEnv, seed=5), corridor_player),
    "corridor_of_babble": (partial(CorridorEnv, seed=5), lambda: None),
}


def played(case: str, batch_size, steps: int, **kwargs):
    """Twice TorchRL's rollout, and twice ours, from the same seeds."""
    make, make_player = CASES[case]
    env, player = make(batch_size=batch_size), make_player()
    torch.manual_seed(0)
    plain = [env.rollout(steps, player, break_when_any_done=False) for _ in range(2)]
    play = CompiledRollout(make(batch_size=batch_size), make_player(), steps, **kwargs)
    torch.manual_seed(0)
    return plain, [play() for _ in range(2)]


def check_equal(one, other):
    assert one.batch_size == other.batch_size
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


SHAPES = [(case, [5]) for case in CASES]
SHAPES += [("wordle_with_sets", []), ("corridor", [2, 3])]


@pytest.mark.parametrize(("case", "batch_size"), SHAPES)
def test_steps_equal_the_rollout_of_torchrl(case, batch_size):
    plain, ours = played(case, batch_size, 14, backend="eager")
    assert plain[0]["next", "done"].any()
    for one, other in zip(plain, ours, strict=True):
        check_equal(one, other)
        assert other.names == one.names


@pytest.mark.parametrize("case", ["wordle_with_sets", "corridor"])
def test_compiled_steps_equal_the_rollout_of_torchrl(case):
    torch.compiler.reset()
    plain, ours = played(case, [5], 14, backend="aot_eager")
    for one, other in zip(plain, ours, strict=True):
        check_equal(one, other)


@pytest.mark.parametrize("case", ["wordle", "corridor_of_babble"])
def test_rows_are_those_of_the_rollout(case):
    plain, ours = played(case, [2, 3], 14, keep="rows", backend="eager")
    for one, other in zip(plain, ours, strict=True):
        check_equal(rows_from_rollout(one, unfinished="drop"), other)


def test_turns_are_those_of_the_rollout():
    plain, ours = played("wordle", [4], 9, keep="turns", backend="eager")
    for one, other in zip(plain, ours, strict=True):
        check_equal(
            one.select("action", ("next", "reward"), *[("next", f"{k}ed") for k in ("terminat", "truncat")]),
            other.exclude(("next", "done")),
        )
        assert torch.equal(one["next", "done"], other["next", "done"])
