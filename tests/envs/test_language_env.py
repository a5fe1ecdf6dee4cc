"""The base of the environments, on the corridor: whose tokens are whose, limits, values, a player."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs import TokenEnv
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer, corridor_value

from .conftest import countdown_env, wordle_env
from .helpers import say, step, transcript


def corridor(n=1, **kwargs):
    env = CorridorEnv(**{"length": 3, "start": 0, "batch_size": [n], "seed": 0, **kwargs})
    env.reset()
    return env


def test_a_walk_token_by_token():
    env = corridor()
    td = say(env, "r")
    assert transcript(env, td) == "<s>0</s>r</a>1</s>"
    assert transcript(env, td, mask="agent_mask") == "r</a>"
    assert td["reward"].item() == -1
    td = say(env, "r")
    assert transcript(env, td) == "<s>0</s>r</a>1</s>r</a>2</s></eod>"
    assert td["token_reward"][0].nonzero().flatten().tolist() == [4]  # on the first turn's </a>; the second earns 0
    assert (td["reward"].item(), td["terminated"].item(), td["truncated"].item()) == (0, True, False)


def test_whose_an_end_is():
    """The environment closes what is full; no tokens at all are a bare end of the agent."""
    env = corridor(2)
    td = step(env, [env.tokenizer.encode("rl"), [env.tokenizer.control.pad] * 2])
    assert [transcript(env, td, row) for row in range(2)] == ["<s>0</s>rl</a>0</s>", "<s>0</s></a>0</s>"]
    assert [transcript(env, td, row, mask="agent_mask") for row in range(2)] == ["rl", "</a>"]
    assert td["token_reward"].nonzero().tolist() == [[0, 4], [1, 3]]


def test_an_id_outside_the_vocabulary_ends_the_utterance():
    env = corridor(2)
    right = env.tokenizer.encode("r")[0]
    td = step(env, [[right, 500], [-1, right]])
    assert [transcript(env, td, row) for row in range(2)] == ["<s>0</s>r</a>1</s>", "<s>0</s></a>0</s>"]
    by_token = TokenEnv(corridor(2))
    by_token.reset()
    td = step(by_token, [500, -1])
    assert [transcript(by_token, td, row) for row in range(2)] == ["<s>0</s></a>0</s>"] * 2


def test_a_row_without_room_for_another_utterance_is_truncated():
    env = countdown_env(batch_size=[1], seed=0)  # T = 24, K = 4, silent
    env.reset()
    for length in (4, 7, 10, 13, 16, 19):  # at 19 tokens four more and their end fill the row
        td = say(env, "gg")
        assert td["attention_mask"].sum() == length
        assert not td["done"].any()
    td = say(env, "")  # at 20 they would not fit
    assert td["truncated"].all()
    assert not td["terminated"].any()


def test_a_first_reset_resets_every_row():
    env = CorridorEnv(batch_size=[2])
    with pytest.raises(RuntimeError, match="reset"):
        step(env, torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="every row"):
        env.reset(TensorDict(_reset=torch.tensor([[True], [False]]), batch_size=[2]))


def test_an_environment_outlives_inference_mode():
    env = wordle_env(batch_size=[3], seed=0)
    with torch.inference_mode():
        env.reset()
        env.rollout(2)
    rows = env.rollout(2)
    assert not rows["tokens"].is_inference()
    with torch.inference_mode():
        assert env.reset()["tokens"].shape == (3, env.row_length)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_corridor_value_by_value_iteration_over_tokens(gamma):
    length = 6
    value = torch.zeros(length)  # at the goal nothing more is earned
    for _ in range(200):
        step = [
            max(
                gamma * (0.0 if to == length - 1 else -1.0) + gamma**2 * value[to]  # the letter, then the end
                for to in (max(place - 1, 0), place, place + 1)
            )
            for place in range(length - 1)
        ]
        value = torch.tensor([*step, 0.0])
    places = torch.arange(length - 1)
    torch.testing.assert_close(corridor_value(length - 1 - places, gamma), value[:-1], rtol=1e-5, atol=1e-6)


def test_the_player_never_walks_straight_and_mostly_errs():
    env = CorridorEnv(length=4, batch_size=[512], seed=0)
    player = CorridorPlayer(env.tokenizer, 4, seed=1)
    rollout = env.rollout(8, player, break_when_any_done=False, break_when_all_done=True)
    final = rollout["next"][:, -1]
    best = corridor_value(3 - rollout["tokens"][:, 0, 1])
    assert (final["token_reward"].sum(-1) < best).all()
    assert final["terminated"].any()
    assert final["truncated"].any()
    # Every place has been left by the better move, but less often than by the worse one: greedy copies stay.
    left, right = env.tokenizer.encode("lr")
    tokens = final["tokens"]
    for place in range(3):
        here = (tokens[:, :-2] == place) & (tokens[:, 2:] == right)
        there = (tokens[:, :-2] == place) & (tokens[:, 2:] == left)
        assert 0 < here.sum() < there.sum()
