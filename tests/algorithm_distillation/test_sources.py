"""Source algorithms against plain loops over one stream, and what every source must do."""

import math

import numpy as np
import pytest
import torch

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation import LearningHistory
from torchrl_lang.algorithm_distillation.sources import (
    UCB,
    LinearDecay,
    NoisyExpert,
    PosteriorSampling,
    QLearning,
    epsilon_greedy,
)
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, random_bandits

STEPS = 30
DECAY = LinearDecay(1.0, 0.25, fraction=(0.5, 0.5))


def room(tasks=9, streams=3, **options):
    options = {"start": "random", "episode_length": 5, **options}
    return DarkRoomEnv(3, task=torch.arange(tasks)[:, None], batch_size=[tasks, streams], **options)


def bandit(streams=3):
    return BernoulliBanditEnv(
        random_bandits(4, 3), task=torch.arange(4)[:, None], batch_size=[4, streams], episode_length=7
    )


def key_door(streams=2):
    tasks = torch.arange(16)[:, None]
    return DarkKeyDoorEnv(2, task=tasks, batch_size=[16, streams], episode_length=6)


SOURCES = {
    "q": lambda **kwargs: QLearning(room(), STEPS, decay=DECAY, **kwargs),
    "q_key_door": lambda **kwargs: QLearning(key_door(), STEPS, decay=DECAY, **kwargs),
    "ucb": lambda **kwargs: UCB(bandit(), STEPS, **kwargs),
    "expert": lambda **kwargs: NoisyExpert(room(), STEPS, decay=DECAY, **kwargs),
    "posterior": lambda **kwargs: PosteriorSampling(room(), STEPS, **kwargs),
    "posterior_noisy": lambda **kwargs: PosteriorSampling(key_door(), STEPS, decay=DECAY, **kwargs),
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sources_run_on_a_gpu(make):
    source = make()
    source.env.to("cuda")
    history = source.history()
    assert history["action"].device.type == "cpu"
    LearningHistory(history, source.tasks)  # checks flags and numbers
    assert (history == source.history()).all()


def epsilon_at(step, steps):
    """The noise of DECAY in a plain formula: from 1 to 0.25 over half of the history."""
    return max(1 - 0.75 * step / (steps / 2), 0.25)


def log_prob_of(best, action, epsilon):
    """The log-probability of an action whose greedy alternatives are the set ``best``, of five."""
    return math.log(epsilon / 5 + (1 - epsilon) * (action in best) / len(best))


@pytest.mark.parametrize("reward", ["every_step", "once"])
def test_q_learning_is_that_of_a_plain_loop(reward):
    # The log-probabilities show the greedy actions, ties included: the whole table, at every step.
    source = QLearning(room(reward=reward), 120, learning_rate=0.5, gamma=0.5, decay=DECAY)
    history = source.history()
    for task in range(9):
        for stream in range(3):
            steps = history[task, stream]
            cells = (steps["observation"] @ torch.tensor([3, 1])).tolist()
            table = np.zeros((9, 5), dtype=np.float32)
            for t in range(119):
                action, earned = steps["action"][t].item(), np.float32(steps["reward"][t].item())
                best = np.flatnonzero(table[cells[t]] == table[cells[t]].max())
                expected = log_prob_of(best, action, epsilon_at(t, 120))
                assert steps["action_log_prob"][t].item() == pytest.approx(expected, abs=1e-5), (task, stream, t)
                row, column = divmod(cells[t], 3)
                add = [(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)][action]
                following = 3 * min(max(row + add[0], 0), 2) + min(max(column + add[1], 0), 2)
                value = np.float32(0) if steps["terminated"][t] else table[following].max()
                old = table[cells[t], action]
                table[cells[t], action] = old + np.float32(0.5) * (earned + np.float32(0.5) * value - old)
                if not steps["done"][t]:
                    assert cells[t + 1] == following
            assert earned == (following == task)


def test_ucb_is_that_of_a_plain_loop():
    history = UCB(bandit(), 60, exploration=0.7).history()
    for task in range(4):
        for stream in range(3):
            steps = history[task, stream]
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
    history = NoisyExpert(room(), 60, decay=DECAY).history()
    for goal in range(9):
        for t in range(60):
            row, column = history["observation"][goal, 0, t].tolist()
            aim_row, aim_column = divmod(goal, 3)
            vertical = [1] * (row > aim_row) + [2] * (row < aim_row)
            level = [3] * (column > aim_column) + [4] * (column < aim_column)
            best = vertical + level or [0]
            expected = log_prob_of(best, history["action"][goal, 0, t].item(), epsilon_at(t, 60))
            assert history["action_log_prob"][goal, 0, t].item() == pytest.approx(expected, abs=1e-5)


def test_the_flags_and_numbers_of_every_history(make):
    source = make()
    history = source.history()
    assert history.shape == (*source.env.batch_size, STEPS)
    flat = history.flatten(0, 1)
    for stream in flat.unbind(0):
        episode, step = 0, 0
        for t in range(STEPS):
            assert (stream["episode"][t].item(), stream["episode_step"][t].item()) == (episode, step)
            limit = step + 1 == source.env.episode_length
            assert stream["done"][t].item() == (limit or stream["terminated"][t].item())
            episode, step = (episode + 1, 0) if stream["done"][t] else (episode, step + 1)
    truncated = flat["done"] & ~flat["terminated"]
    assert truncated.any()


def test_a_history_is_the_same_every_time_and_in_any_blocks(make):
    source = make(seed=3)
    whole, blocks = source.history(), torch.cat(list(source.blocks(7)), -1)
    again = make(seed=3).history()
    assert (whole == blocks).all()
    assert (whole == again).all()
    assert not torch.equal(make(seed=4).history()["action"], whole["action"])


def test_epsilon_greedy_samples_its_probabilities():
    best = torch.tensor([[True, False, True, False]]).expand(40_000, 4)
    action, log_prob = epsilon_greedy(best, torch.full((40_000,), 0.2), RandomStream(0))
    share = action.bincount(minlength=4) / 40_000
    torch.testing.assert_close(share, torch.tensor([0.45, 0.05, 0.45, 0.05]), atol=0.012, rtol=0)  # 5 deviations
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.45, 0.05, 0.45, 0.05])[action])


def test_linear_decay_by_hand():
    decay = LinearDecay(0.8, 0.2, fraction=(0.1, 0.3))
    drawn = decay.draw(10_000, RandomStream(0))
    assert 0.1 <= drawn.min() < 0.11
    assert 0.29 < drawn.max() <= 0.3
    fraction = torch.tensor([0.1, 0.2])
    torch.testing.assert_close(decay.at(0.05, fraction), torch.tensor([0.5, 0.65]))
    torch.testing.assert_close(decay.at(0.2, fraction), torch.tensor([0.2, 0.2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QLearning(DarkRoomEnv(3, task=0, batch_size=[4]), 10), r"\[tasks, streams\].*got \[4\]"),
        (lambda: QLearning(DarkRoomEnv(3, batch_size=[4, 2]), 10), "one task in each row"),
        (lambda: QLearning(DarkRoomEnv(3, task=torch.arange(2), batch_size=[4, 2]), 10), "one task in each row"),
        (lambda: QLearning(room(), 0), "steps must be an integer of at least 1"),
        (lambda: QLearning(room(), 10, gamma=2), r"gamma must lie in \[0, 1\], got 2"),
        (lambda: UCB(room(), 10), "DarkRoomEnv has 9"),
        (lambda: UCB(bandit(), 10, exploration=-1), r"exploration must lie in \[0, inf\)"),
        (lambda: PosteriorSampling(bandit(), 10), "rewards are not random, got BernoulliBanditEnv"),
        (lambda: LinearDecay(2), r"first must lie in \[0, 1\]"),
        (lambda: LinearDecay(fraction=(0, 1)), r"interval in \(0, 1\]"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
