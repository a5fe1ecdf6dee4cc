"""Gymnasium environments as text games."""

from __future__ import annotations

import pytest
import torch

from tests.envs.helpers import say_after
from torchrl_lang.envs import GymnasiumGame, TextGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer, from_row

gymnasium = pytest.importorskip("gymnasium")

LETTERS = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz0123456789 .,-:[]()'")


class Echo(gymnasium.Env):
    """Repeats a text, ends at its first letter; a limit of turns is the wrapper's."""

    observation_space = gymnasium.spaces.Text(8, charset="abcd")
    action_space = gymnasium.spaces.Text(3, charset="abcd")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = "abcd"[int(self.np_random.integers(4))]
        return self.first, {"seed": seed}

    def step(self, action):
        return action * 2, float(len(action)), action == self.first, False, {}


def echo_env(batch_size=(2,), **options):
    def make():
        return GymnasiumGame(gymnasium.wrappers.TimeLimit(Echo(), 3), invalid_reply="no", invalid_reward=-1.0)

    return TextGameEnv(make, LETTERS, row_length=40, action_length=5, batch_size=batch_size, seed=0, **options)


def walk_env(batch_size=(2,)):
    """Gymnasium's frozen lake, told as coordinates: discrete spaces by two functions."""

    def act(text):
        return ["left", "down", "right", "up"].index(text)

    def make():
        lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
        return GymnasiumGame(lake, observe=lambda cell: f"{cell // 4},{cell % 4}", act=act, invalid_reply="no")

    return TextGameEnv(make, LETTERS, row_length=120, action_length=6, batch_size=batch_size, seed=0)


@pytest.mark.parametrize(("make", "words"), [(echo_env, ["a", "bc", "abcd"]), (walk_env, ["down", "right", "upp"])])
def test_the_rules_of_language_environments(make, words):
    check_language_env(make(), lambda n: make([n]), utterances=words)


def test_the_shortest_path_over_the_lake():
    env = walk_env([1])
    td = env.reset()
    for word in ("down", "down", "right", "right", "down", "right"):
        assert not td["done"].any()
        td = say_after(env, td, word)
    assert td["terminated"].all()
    assert td["reward"].item() == 1.0
    turns = from_row(td[0], LETTERS).turns
    assert [turn.text for turn in turns[::2]] == ["0,0", "1,0", "2,0", "2,1", "2,2", "3,2", "3,3"]


def test_seeds_flags_and_invalid_actions():
    env = echo_env()
    first = env.reset(game_seed=torch.tensor([3, 3]))
    letters = [from_row(row, LETTERS).turns[0].text for row in first]
    assert letters[0] == letters[1]
    other = next(letter for letter in "abcd" if letter != letters[0])
    td = say_after(env, first, "z", letters[0])  # not in the action space; the end
    assert td["reward"].flatten().tolist() == [-1.0, 1.0]
    assert td["terminated"].flatten().tolist() == [False, True]
    assert from_row(td[0], LETTERS).turns[-1].text == "no"
    for _ in range(3):
        td = say_after(env, td, other, other)
    assert td["truncated"].flatten().tolist() == [True, False]  # by TimeLimit


def test_other_spaces_need_functions():
    lake = gymnasium.make("FrozenLake-v1")
    with pytest.raises(TypeError, match="observe="):
        GymnasiumGame(lake)
    with pytest.raises(TypeError, match="act="):
        GymnasiumGame(lake, observe=str)
    game = GymnasiumGame(lake, observe=lambda cell: cell, act=int)
    with pytest.raises(TypeError, match="expected a text"):
        game.reset(0)
    game.close()
