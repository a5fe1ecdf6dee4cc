"""Gymnasium environments as text games."""

import pytest

from tests.envs.helpers import check_game
from torchrl_lang.envs import GymnasiumGame

gymnasium = pytest.importorskip("gymnasium")


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


def act(text):
    if text == "z":
        raise ValueError(text)
    return text


def make(**options):
    return GymnasiumGame(gymnasium.wrappers.TimeLimit(Echo(), 3), invalid_reply="no", invalid_reward=-1.0, **options)


def test_the_rules_of_language_environments():
    check_game(lambda: make(act=act), "a", "bc", "abcd", "z", row_length=40, action_length=5)


def test_seeds_flags_and_invalid_actions():
    game = make(act=act, observe=lambda text: f"saw {text}")
    first = game.reset(3)[-1]
    assert game.reset(3) == f"saw {first}"
    other = "b" if first == "a" else "a"
    for text in ("z", "f", "abcd"):  # act raises an error, or the action space has no such text
        assert game.step(text)[:4] == ("no", -1.0, False, False)
    assert game.step(other)[:4] == (f"saw {other * 2}", 1.0, False, False)
    assert game.step(first)[:4] == (f"saw {first * 2}", 1.0, True, False)
    game.reset(3)
    assert [game.step(other)[3] for _ in range(3)] == [False, False, True]  # by TimeLimit


def test_other_spaces_need_functions():
    lake = gymnasium.make("FrozenLake-v1")
    assert GymnasiumGame(lake, observe=str, act=int).reset(0) == "0"
    for options, noun in (({}, "observe="), ({"observe": str}, "act=")):
        with pytest.raises(TypeError, match=noun):
            GymnasiumGame(lake, **options)
