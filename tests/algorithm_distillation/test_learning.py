"""A model that trains for seconds improves within its context on goals that it never saw."""

import pytest
import torch

from torchrl_lang.algorithm_distillation import (
    ADLoss,
    ADTransformer,
    HistoryActor,
    HistoryWindows,
    LearningHistory,
    evaluate_in_context,
    in_context_report,
    split_tasks,
)
from torchrl_lang.algorithm_distillation.sources import LinearDecay, NoisyExpert
from torchrl_lang.envs.grids import DarkRoomEnv
from torchrl_lang.training import adamw, train_steps, warmup_cosine

SIZE, EPISODE, CONTEXT, STEPS = 4, 8, 32, 160
GOALS = split_tasks([cell for cell in range(SIZE**2) if cell != 10], validation=0, test=0.2, seed=0)  # start at 10


def room(goals, streams):
    return DarkRoomEnv(SIZE, task=goals[:, None], batch_size=[len(goals), streams], episode_length=EPISODE)


def trained(decay):
    env = room(GOALS.train, 100)
    source = NoisyExpert(env, 8 * EPISODE, decay=decay)
    windows = HistoryWindows(LearningHistory(source.history(), source.tasks), CONTEXT, at_episode_start=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ADTransformer.for_env(env, context=CONTEXT, width=32, layers=2, heads=2)
    loss = ADLoss(model)
    optimizer = adamw(loss, 5e-3, weight_decay=0.05)
    schedule = warmup_cosine(optimizer, STEPS, warmup=20, final=0.02)
    for _ in train_steps(loss, windows.buffer(32).sample, optimizer, steps=STEPS, scheduler=schedule, max_grad_norm=1):
        pass
    return model


def report(model):
    env = room(GOALS.test, 64)
    returns = evaluate_in_context(env, HistoryActor(model), 15)
    return in_context_report("AD", returns[None], env.optimal_return()[:, 0], tasks=GOALS.test)


@pytest.mark.slow
def test_returns_on_unseen_goals_rise_over_episodes():
    found = report(trained(LinearDecay(fraction=(0.2, 0.6))))
    assert found.gain > 3
    assert found.share_of_optimal.mean > 0.5
    assert found.late_beats_early.wins == 1
    assert all(result.last > 1.5 * result.first for result in found.tasks)
    # Expert distillation: a model of the final policies alone has no exploration to imitate.
    expert = report(trained(LinearDecay(0, 0)))
    assert found.share_of_optimal.mean > 2 * expert.share_of_optimal.mean
