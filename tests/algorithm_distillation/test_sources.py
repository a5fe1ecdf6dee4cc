"""Source algorithms against plain loops over one stream, and what every source must do."""

import math

import numpy as np
import pytest
import torch

from tests.envs.grids.reference import key_door_step, moved, room_step
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation import episode_returns, sources
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, random_bandits

STEPS = 30
DECAY = sources.LinearDecay(1.0, 0.25, fraction=(0.5, 0.5))


def room(size=3, streams=3, **options):
    options = {"start": "random", "episode_length": 5, **options}
    return DarkRoomEnv(size, task=torch.arange(size**2)[:, None], batch_size=[size**2, streams], **options)


def bandit():
    tasks = torch.arange(4)[:, None]
    return BernoulliBanditEnv(random_bandits(4, 3), task=tasks, batch_size=[4, 3], episode_length=7)


def key_door():
    return DarkKeyDoorEnv(2, task=torch.arange(16)[:, None], batch_size=[16, 2], episode_length=6)


SOURCES = {
    "q": lambda **kwargs: sources.QLearning(room(), STEPS, decay=DECAY, **kwargs),
    "q_key_door": lambda **kwargs: sources.QLearning(key_door(), STEPS, decay=DECAY, **kwargs),
    "ucb": lambda **kwargs: sources.UCB(bandit(), STEPS, **kwargs),
    "expert": lambda **kwargs: sources.NoisyExpert(room(), STEPS, decay=DECAY, **kwargs),
    "expert_alone": lambda **kwargs: sources.NoisyExpert(room(streams=1), STEPS, decay=DECAY, **kwargs),
    "posterior": lambda **kwargs: sources.PosteriorSampling(room(), STEPS, **kwargs),
    "posterior_noisy": lambda **kwargs: sources.PosteriorSampling(key_door(), STEPS, decay=DECAY, **kwargs),
}


@pytest.fixture(params=SOURCES)
def make(request):
    return SOURCES[request.param]


def test_every_tensor_is_made_on_the_device_of_the_environment(make):
    """Tensors that do not name their device would be made on another one, without memory."""
    source = make()
    source.env.to("cpu")  # one without a device makes tensors on torch's default device
    expected = source.history()
    with torch.device("meta"):
        found = source.history()
    assert (found == expected).all()


def epsilon_at(step, steps):
    """The noise of DECAY in a plain formula: from 1 to 0.25 over half of the history."""
    return max(1 - 0.75 * step / (steps / 2), 0.25)


def log_prob_of(best, action, epsilon):
    """The log-probability of an action whose greedy alternatives are the set ``best``, of five."""
    return math.log(epsilon / 5 + (1 - epsilon) * (action in best) / len(best))


@pytest.mark.parametrize("reward", ["every_step", "once"])
def test_q_learning_is_that_of_a_plain_loop(reward):
    # The log-probabilities show the greedy actions, ties included: the whole table, at every step.
    source = sources.QLearning(room(reward=reward), 120, learning_rate=0.5, gamma=0.5, decay=DECAY)
    history = source.history()
    for task, stream in [(goal, number) for goal in range(9) for number in range(goal % 3, 3, 2)]:
        steps = history[task, stream]
        cells = (steps["observation"] @ torch.tensor([3, 1])).tolist()
        table = np.zeros((9, 5), dtype=np.float32)
        for t in range(119):
            action, earned = steps["action"][t].item(), np.float32(steps["reward"][t].item())
            best = np.flatnonzero(table[cells[t]] == table[cells[t]].max())
            expected = log_prob_of(best, action, epsilon_at(t, 120))
            assert steps["action_log_prob"][t].item() == pytest.approx(expected, abs=1e-5), (task, stream, t)
            following = int(np.dot(moved(3, divmod(cells[t], 3), action), (3, 1)))
            value = np.float32(0) if steps["terminated"][t] else table[following].max()
            old = table[cells[t], action]
            table[cells[t], action] = old + np.float32(0.5) * (earned + np.float32(0.5) * value - old)
            assert steps["done"][t] or cells[t + 1] == following
        assert earned == (following == task)


def test_ucb_is_that_of_a_plain_loop():
    for steps in sources.UCB(bandit(), 60, exploration=0.7).history().flatten(0, 1):
        pulls, earned = [0] * 3, [0.0] * 3
        for t in range(60):
            if 0 in pulls:
                score = [math.inf if n == 0 else 0 for n in pulls]
            else:
                score = [e / n + 0.7 * math.sqrt(2 * math.log(t) / n) for e, n in zip(earned, pulls, strict=True)]
            best = [arm for arm in range(3) if score[arm] >= max(score) - 1e-12]
            action = steps["action"][t].item()
            assert action in best
            assert steps["action_log_prob"][t].item() == pytest.approx(-math.log(len(best)), abs=1e-6)
            pulls[action] += 1
            earned[action] += steps["reward"][t].item()


def test_noisy_expert_is_that_of_a_plain_loop():
    source = sources.NoisyExpert(room(), 60, decay=DECAY)
    for goal, steps in enumerate(source.history()[:, 0]):
        for t, step in enumerate(steps):
            best = best_actions(source.env, tuple(step["observation"].tolist()), goal)
            expected = log_prob_of(best, step["action"].item(), epsilon_at(t, 60))
            assert step["action_log_prob"].item() == pytest.approx(expected, abs=1e-5)


def test_the_flags_and_numbers_of_every_history(make):
    source = make()
    history = source.history()
    assert history.shape == (*source.env.batch_size, STEPS)
    flat = history.flatten(0, 1)
    for stream in flat.unbind(0):
        episode, number = 0, 0
        for step in stream.unbind(0):
            assert (step["episode"].item(), step["episode_step"].item()) == (episode, number)
            assert step["done"].item() == (number + 1 == source.env.episode_length or step["terminated"].item())
            episode, number = (episode + 1, 0) if step["done"] else (episode, number + 1)
    assert (flat["done"] & ~flat["terminated"]).any()


def test_a_history_is_the_same_every_time_and_in_any_blocks(make):
    source = make(seed=3)
    whole, blocks = source.history(), torch.cat(list(source.blocks(7)), -1)
    assert (whole == blocks).all()
    assert (whole == make(seed=3).history()).all()
    assert not torch.equal(make(seed=4).history()["action"], whole["action"])


def test_epsilon_greedy_samples_its_probabilities():
    best = torch.tensor([[True, False, True, False]]).expand(40_000, 4)
    action, log_prob = sources.epsilon_greedy(best, torch.full((40_000,), 0.2), RandomStream(0))
    share = action.bincount(minlength=4) / 40_000
    torch.testing.assert_close(share, torch.tensor([0.45, 0.05, 0.45, 0.05]), atol=0.012, rtol=0)  # 5 deviations
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.45, 0.05, 0.45, 0.05])[action])


def test_linear_decay_by_hand():
    decay = sources.LinearDecay(0.8, 0.2, fraction=(0.1, 0.3))
    drawn = decay.draw(10_000, RandomStream(0))
    assert 0.1 <= drawn.min() < 0.11
    assert 0.29 < drawn.max() <= 0.3
    fraction = torch.tensor([0.1, 0.2])
    torch.testing.assert_close(decay.at(0.05, fraction), torch.tensor([0.5, 0.65]))
    torch.testing.assert_close(decay.at(0.2, fraction), torch.tensor([0.2, 0.2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sources.QLearning(DarkRoomEnv(3, task=0, batch_size=[4]), 10), r"\[tasks, streams\].*got \[4\]"),
        (lambda: sources.QLearning(DarkRoomEnv(3, batch_size=[4, 2]), 10), "one task in each row"),
        (lambda: sources.QLearning(room(), 10, gamma=2), r"gamma must lie in \[0, 1\], got 2"),
        (lambda: sources.UCB(room(), 10), "DarkRoomEnv has 9"),
        (lambda: sources.PosteriorSampling(bandit(), 10), "rewards are not random, got BernoulliBanditEnv"),
        (lambda: sources.LinearDecay(fraction=(0, 1)), r"interval in \(0, 1\]"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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


class Watched(sources.PosteriorSampling):
    """Keeps the task that each stream acted for at each step."""

    def _begin(self, random):
        super()._begin(random)
        self.acted_for = []

    def _best(self):
        self.acted_for.append(self._drawn.clone())
        return super()._best()


@pytest.mark.parametrize(
    ("env", "decay"),
    [(room(), DECAY), (room(reward="once"), sources.NO_NOISE), (key_door(), DECAY)],
    ids=["every_step", "once", "key_door"],
)
def test_posterior_sampling_is_that_of_a_plain_loop(env, decay):
    source = Watched(env, 60, decay=decay, seed=1)
    history = source.history().flatten(0, 1)
    acted_for, kept, redrawn = torch.stack(source.acted_for, -1).tolist(), 0, 0
    for number, stream in enumerate(history.unbind(0)):
        steps = {task: step_of(env, task) for task in range(env.n_tasks)}
        possible, drawn, has_key = set(steps), None, False
        for t in range(60):
            if drawn in possible:  # a task that agrees with all rewards is acted for until one contradicts it
                assert acted_for[number][t] == drawn
                kept += 1
            else:
                redrawn += 1
            drawn = acted_for[number][t]
            assert drawn in possible, (number, t)
            cell, action = tuple(stream["observation"][t].tolist()), stream["action"][t].item()
            state = (cell, has_key) if isinstance(env, DarkKeyDoorEnv) else cell
            best = best_actions(env, state, drawn)
            log_prob = log_prob_of(best, action, epsilon_at(t, 60) if decay is DECAY else 0.0)
            assert stream["action_log_prob"][t].item() == pytest.approx(log_prob, abs=1e-5), (number, t)
            reward = stream["reward"][t].item()
            possible = {task for task in possible if steps[task](state, action)[1] == reward}
            has_key = (has_key or reward == 1) and not stream["done"][t].item()
        assert number // env.batch_size[1] in possible
    assert min(kept, redrawn) > len(history)


@pytest.mark.parametrize("reward", ["every_step", "once"])
def test_after_its_first_reward_a_stream_is_optimal(reward):
    env = room(size=5, streams=4, start="centre", episode_length=12, reward=reward)
    returns = episode_returns(sources.PosteriorSampling(env, 16 * 12).history(), 16)
    optimal = env.optimal_return()[..., None].expand_as(returns)
    found = (returns > 0).cumsum(-1) > 0
    later = torch.cat([torch.zeros_like(found[..., :1]), found[..., :-1]], -1)
    assert torch.equal(returns[later], optimal[later])
    assert later[..., -1].all()
    assert (~found[..., 0]).float().mean() > 0.3  # the search took more than an episode
