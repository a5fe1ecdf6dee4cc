"""Posterior sampling against a plain loop over one stream: sets of cells, from which rewards rule tasks out."""

import math

import pytest
import torch

from tests.envs.grids.reference import key_door_step, moved, room_step
from torchrl_lang.algorithm_distillation import episode_returns
from torchrl_lang.algorithm_distillation.sources import NO_NOISE, LinearDecay, PosteriorSampling
from torchrl_lang.envs.grids import DarkKeyDoorEnv, DarkRoomEnv

STEPS = 60


def room(size=3, streams=3, **options):
    options = {"start": "random", "episode_length": 5, **options}
    return DarkRoomEnv(size, task=torch.arange(size**2)[:, None], batch_size=[size**2, streams], **options)


def key_door():
    return DarkKeyDoorEnv(2, task=torch.arange(16)[:, None], batch_size=[16, 2], episode_length=6)


FAMILIES = {"every_step": room, "once": lambda: room(reward="once"), "key_door": key_door}
DECAYS = {"greedy": NO_NOISE, "noisy": LinearDecay(1.0, 0.25, fraction=(0.5, 0.5))}


def step_of(env, task):
    """The rules with a task, in plain Python."""
    size = env.size
    if isinstance(env, DarkKeyDoorEnv):
        return key_door_step(size, *(divmod(cell, size) for cell in divmod(task, size**2)))
    return room_step(size, divmod(task, size), env.reward == "once")


def best_actions(env, state, task):
    """The first moves of the shortest paths to what the task asks for next."""
    size, aim = env.size, task
    if isinstance(env, DarkKeyDoorEnv):
        (cell, has_key), (key, door) = state, divmod(task, size**2)
        aim = door if has_key else key
    else:
        cell = state
    row, column = divmod(aim, size)
    away = [abs(r - row) + abs(c - column) for r, c in (moved(size, cell, action) for action in range(5))]
    return [0] if away[0] == 0 else [action for action in range(1, 5) if away[action] < away[0]]


class Watched(PosteriorSampling):
    """Keeps the task that each stream acted for at each step."""

    def _begin(self, random):
        super()._begin(random)
        self.acted_for = []

    def _best(self):
        self.acted_for.append(self._drawn.clone())
        return super()._best()


@pytest.mark.parametrize(("family", "decay"), [("every_step", "noisy"), ("once", "greedy"), ("key_door", "noisy")])
def test_posterior_sampling_is_that_of_a_plain_loop(family, decay):
    env = FAMILIES[family]()
    source = Watched(env, STEPS, decay=DECAYS[decay], seed=1)
    history = source.history().flatten(0, 1)
    acted_for, kept, redrawn = torch.stack(source.acted_for, -1).tolist(), 0, 0
    for number, stream in enumerate(history.unbind(0)):
        steps = {task: step_of(env, task) for task in range(env.n_tasks)}
        possible, drawn, has_key = set(steps), None, False
        for t in range(STEPS):
            if drawn in possible:  # a task that agrees with all rewards is acted for until one contradicts it
                assert acted_for[number][t] == drawn
                kept += 1
            else:
                redrawn += 1
            drawn = acted_for[number][t]
            assert drawn in possible, (number, t)
            cell, action = tuple(stream["observation"][t].tolist()), stream["action"][t].item()
            state = (cell, has_key) if family == "key_door" else cell
            best = best_actions(env, state, drawn)
            noise = 0.0 if decay == "greedy" else max(1 - 0.75 * t / (STEPS / 2), 0.25)
            log_prob = math.log(noise / 5 + (1 - noise) * (action in best) / len(best))
            assert stream["action_log_prob"][t].item() == pytest.approx(log_prob, abs=1e-5), (number, t)
            reward = stream["reward"][t].item()
            possible = {task for task in possible if steps[task](state, action)[1] == reward}
            has_key = (has_key or reward == 1) and not stream["done"][t].item()
        assert number // env.batch_size[1] in possible
    assert min(kept, redrawn) > len(history)


@pytest.mark.parametrize("reward", ["every_step", "once"])
def test_after_its_first_reward_a_stream_is_optimal(reward):
    env = room(size=5, streams=8, start="centre", episode_length=12, reward=reward)
    returns = episode_returns(PosteriorSampling(env, 20 * 12).history(), 20)
    optimal = env.optimal_return()[..., None].expand_as(returns)
    found = (returns > 0).cumsum(-1) > 0
    later = torch.cat([torch.zeros_like(found[..., :1]), found[..., :-1]], -1)
    assert torch.equal(returns[later], optimal[later])
    assert later[..., -1].all()
    assert (~found[..., 0]).float().mean() > 0.3  # the search took more than an episode


def test_draws_are_uniform_over_what_is_possible():
    source = PosteriorSampling(DarkRoomEnv(3, task=0, batch_size=[1, 9000]), 1, seed=3)
    list(source.blocks())
    source._possible = torch.tensor([True, False, True, True, False, False, False, False, True]).expand(9000, 9)
    share = source._draw().bincount(minlength=9) / 9000
    expected = torch.tensor([0.25, 0, 0.25, 0.25, 0, 0, 0, 0, 0.25])
    torch.testing.assert_close(share, expected, atol=0.023, rtol=0)  # 5 deviations
    assert (share[expected == 0] == 0).all()
