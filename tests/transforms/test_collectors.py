"""Collectors with worker processes: the reference travels, the controller is shared."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import ParallelEnv, Transform, TransformedEnv

from tests.transforms.conftest import drift, make_actor, make_env
from torchrl_lang.transforms import ConstantKLController, KLConstrainedTransform


def transformed(transform=None):
    env = make_env("tanh-normal", (3,))
    return env if transform is None else TransformedEnv(env, transform)


def built_there():
    return transformed(KLConstrainedTransform(make_actor("tanh-normal"), 0.3))


def assert_adjusted(steps, before, coef):
    with torch.no_grad():
        ref = before.get_dist(steps.select("observation")).log_prob(steps["action"])
    kl = steps["action_log_prob"] - ref
    out = steps["next"]
    torch.testing.assert_close(out["ref_log_prob"], ref, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out["reward"], out["raw_reward"] - coef * kl.unsqueeze(-1), rtol=1e-3, atol=1e-3)


OPTIONS = {"frames_per_batch": 12, "total_frames": 48, "auto_register_policy_transforms": False}


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_multi_sync_collector_follows_the_controller(place):
    """The main process changes the coefficient; the next batch of the workers has the new one."""
    actor, before = make_actor("tanh-normal"), make_actor("tanh-normal")
    controller = ConstantKLController(0.3).share_memory()
    transform = KLConstrainedTransform(actor, controller)
    drift(actor)
    make = functools.partial(transformed, None if place == "postproc" else transform)
    postproc = transform if place == "postproc" else None
    collector = MultiSyncCollector([make, make], actor, postproc=postproc, **OPTIONS)
    try:
        batches = iter(collector)
        assert_adjusted(next(batches), before, 0.3)
        controller.coef.fill_(0.05)
        assert_adjusted(next(batches), before, 0.05)
    finally:
        collector.shutdown()


def test_multi_async_collector():
    """With a reference that each worker builds for itself, in its environment's factory."""
    actor, before = make_actor("tanh-normal"), make_actor("tanh-normal")
    drift(actor)
    collector = MultiAsyncCollector([built_there, built_there], actor, **OPTIONS)
    try:
        for batch in collector:
            assert_adjusted(batch, before, 0.3)
    finally:
        collector.shutdown()


class Scaled(Transform):
    """A reward transform of a user's own, which may stand in the workers of a ``ParallelEnv``."""

    def __init__(self, controller):
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self.controller = controller

    def _apply_transform(self, reward):
        return self.controller() * torch.ones_like(reward)


def test_workers_of_a_parallel_env_follow_a_controller():
    controller = ConstantKLController(0.3).share_memory()
    env = ParallelEnv(2, functools.partial(transformed, Scaled(controller)))
    try:
        td = env.reset()
        for coef in (0.3, 0.05):
            controller.coef.fill_(coef)
            td = env.step(env.rand_action(td.select("observation", "count", "done", "terminated")))
            torch.testing.assert_close(td["next", "reward"], torch.full((2, 3, 1), coef))
    finally:
        env.close()
