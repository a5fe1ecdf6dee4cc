"""Policies that begin with a demonstration: the same as an actor that is given it, at every beginning."""

import torch

from tests.algorithm_distillation.models import EPISODE, model, windows
from torchrl_lang.algorithm_distillation import ContextPolicy, Discrete, HistoryActor, PromptedPolicy

STREAMS = 9


def demonstration(made, seed=0):
    """Three steps of an episode in each stream."""
    return windows(made, rows=STREAMS, length=3, seed=seed).set("episode_step", torch.arange(3).expand(STREAMS, 3))


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
