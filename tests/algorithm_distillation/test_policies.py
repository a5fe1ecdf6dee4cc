"""Policies that begin with a demonstration: the same as an actor that is given it, at every beginning."""

import pytest
import torch

from tests.algorithm_distillation.models import EPISODE, model, windows
from torchrl_lang.algorithm_distillation import (
    ContextPolicy,
    Discrete,
    HistoryActor,
    PromptedPolicy,
    evaluate_in_context,
)
from torchrl_lang.envs.grids import DarkRoomEnv

STREAMS = 9


@pytest.fixture
def env():
    return DarkRoomEnv(3, task=torch.arange(STREAMS), batch_size=[STREAMS], episode_length=EPISODE)


def demonstration(made, seed=0):
    """Three steps of an episode in each stream."""
    return windows(made, rows=STREAMS, length=3, seed=seed).set("episode_step", torch.arange(3).expand(STREAMS, 3))


def first_parameters(made, policy):
    """The parameters of the first actions in the same observations."""
    found = []
    hook = made.action_head.register_forward_hook(lambda module, inputs, output: found.append(output))
    policy.begin(STREAMS)
    policy.act(torch.ones(STREAMS, 2, dtype=torch.int64))
    hook.remove()
    return found[-1]


def test_it_is_an_actor_that_was_prompted():
    made = model(Discrete([3, 3]))
    steps = demonstration(made)
    policy = PromptedPolicy(HistoryActor(made, seed=1), steps)
    actor = HistoryActor(made, seed=1)
    assert isinstance(policy, ContextPolicy)
    policy.begin(STREAMS)
    actor.begin(STREAMS)
    actor.prompt(steps)
    random = torch.Generator().manual_seed(0)
    for t in range(20):
        seen = torch.randint(3, (STREAMS, 2), generator=random)
        assert torch.equal(policy.act(seen), actor.act(seen))
        reward, done = torch.rand(STREAMS, generator=random), torch.full((STREAMS,), t % EPISODE == EPISODE - 1)
        policy.observe(reward, done)
        actor.observe(reward, done)


def test_each_stream_reads_its_own_demonstration():
    made = model(Discrete([3, 3]))
    steps, other = demonstration(made), demonstration(made, seed=1)
    changed = steps.clone()
    changed[4] = other[4]
    found, expected = (first_parameters(made, PromptedPolicy(HistoryActor(made), rows)) for rows in (changed, steps))
    same = torch.arange(STREAMS) != 4
    torch.testing.assert_close(found[same], expected[same])
    assert not torch.allclose(found[4], expected[4], atol=1e-3)
    assert not torch.allclose(expected, first_parameters(made, HistoryActor(made)), atol=1e-3)


def test_the_cache_changes_nothing(env):
    made = model(Discrete([3, 3]))
    found = [
        evaluate_in_context(env, PromptedPolicy(HistoryActor(made, cache=cache), demonstration(made)), 8, seed=2)
        for cache in (True, False)
    ]
    assert torch.equal(*found)
