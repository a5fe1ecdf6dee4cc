"""The values that the small games promise, against dynamic programming, enumeration and play."""

import pytest
import torch

from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer, corridor_value


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
