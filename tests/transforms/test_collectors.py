"""Collectors with worker processes: the reference travels, the controller is shared."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import TransformedEnv

from tests.transforms.conftest import drift, make_actor, make_env
from torchrl_lang.transforms import ConstantKLController, KLConstrainedTransform, LazyReference


def transformed(transform=None):
    env = make_env("tanh-normal", (3,))
    return env if transform is None else TransformedEnv(env, transform)


def reference():
    return make_actor("tanh-normal")


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


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_multi_async_collector(place):
    """With a reference that each worker builds for itself."""
    actor, before = make_actor("tanh-normal"), reference()
    transform = KLConstrainedTransform(LazyReference(reference), 0.3)
    drift(actor)
    make = functools.partial(transformed, None if place == "postproc" else transform)
    postproc = transform if place == "postproc" else None
    collector = MultiAsyncCollector([make, make], actor, postproc=postproc, **OPTIONS)
    try:
        for batch in collector:
            assert_adjusted(batch, before, 0.3)
    finally:
        collector.shutdown()
