"""Collectors with worker processes: the reference travels, the controller is shared."""

from __future__ import annotations

import functools

import torch
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import ParallelEnv, Transform, TransformedEnv

from tests.transforms.conftest import drift, make_actor, make_env
from torchrl_lang.transforms import ConstantKLController, KLConstrainedTransform


def transformed(transform=None):
    env = make_env("tanh-normal", (3,))
    return env if transform is None else TransformedEnv(env, transform)


def built_in_the_worker(controller):
    return transformed(KLConstrainedTransform(make_actor("tanh-normal"), controller))


def assert_adjusted(steps, before, coef):
    with torch.no_grad():
        ref = before.get_dist(steps.select("observation")).log_prob(steps["action"])
    kl = steps["action_log_prob"] - ref
    out = steps["next"]
    torch.testing.assert_close(out["ref_log_prob"], ref, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out["reward"], out["raw_reward"] - coef * kl.unsqueeze(-1), rtol=1e-3, atol=1e-3)


OPTIONS = {"frames_per_batch": 12, "total_frames": 48, "auto_register_policy_transforms": False}


def test_multi_sync_collector_follows_the_controller():
    """The main process changes the coefficient; the next batch of the workers has the new one.

    One worker gets the transform, one builds it with its own reference; a second penalty is in ``postproc``.
    """
    actor, before = make_actor("tanh-normal"), make_actor("tanh-normal")
    controller = ConstantKLController(0.3).share_memory()
    transform = KLConstrainedTransform(actor, controller)
    behind = KLConstrainedTransform(actor, controller, out_keys="shaped", name="second")
    drift(actor)
    makers = [functools.partial(transformed, transform), functools.partial(built_in_the_worker, controller)]
    collector = MultiSyncCollector(makers, actor, postproc=behind, **OPTIONS)
    try:
        batches = iter(collector)
        for coef in (0.3, 0.05):
            controller.coef.fill_(coef)
            steps = next(batches)
            assert_adjusted(steps, before, coef)
            out = steps["next"]
            torch.testing.assert_close(out["second_kl"], out["kl"], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(out["shaped"], out["reward"] - coef * out["second_kl"].unsqueeze(-1))
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
