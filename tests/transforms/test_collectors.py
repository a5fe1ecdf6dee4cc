"""Collectors with worker processes: the reference travels, the controller is shared."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.test_rows import jitter, speaker, wordle
from tests.transforms.world import assert_adjusted, drifted, make_actor, make_env
from torchrl_lang.data import EpisodeRows
from torchrl_lang.envs import check_language_env
from torchrl_lang.transforms import ConstantKLController, KLConstrainedTransform, RowReference, frozen_copy


def transformed(transform):
    return TransformedEnv(make_env("tanh-normal", (3,)), transform)


def built_in_the_worker(controller):
    return transformed(KLConstrainedTransform(make_actor("tanh-normal"), controller))


OPTIONS = {"frames_per_batch": 12, "total_frames": 48, "auto_register_policy_transforms": False}


def test_multi_sync_collector_follows_the_controller():
    """The main process changes the coefficient; the next batch of the workers has the new one.

    One worker gets the transform, one builds it with its own reference.
    """
    controller = ConstantKLController(0.3).share_memory()
    transform, actor, before = drifted(coef=controller)
    makers = [functools.partial(transformed, transform), functools.partial(built_in_the_worker, controller)]
    collector = MultiSyncCollector(makers, actor, **OPTIONS)
    try:
        batches = iter(collector)
        for coef in (0.3, 0.05):
            controller.coef.fill_(coef)
            assert_adjusted(next(batches), actor, before, coef=coef)
    finally:
        collector.shutdown()


def moved(env):
    """A policy that has moved, and as it was."""
    policy = speaker(env)
    frozen = frozen_copy(policy)
    jitter(policy)
    return policy, frozen


def test_the_penalty_of_a_turn_is_the_sum_over_its_tokens():
    """That turns add up to rows: ``tests/data/test_rollouts.py``."""
    base = wordle(8)
    policy, frozen = moved(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen, 0.5))
    steps = env.rollout(12, policy, break_when_any_done=False)
    step = steps["next"]
    assert step["kl"].shape == (8, 12, 6) == step["ref_log_prob"].shape
    torch.testing.assert_close(step["kl"], steps["token_log_prob"] - step["ref_log_prob"])
    expected = step["raw_reward"] - 0.5 * step["kl"].sum(-1, keepdim=True)
    torch.testing.assert_close(step["reward"], expected)


@pytest.mark.parametrize("limit", [None, 3.0])
def test_specs_and_the_contract_of_language_environments(limit):
    base = wordle(4)
    _, frozen = moved(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen, limit=limit, missing="zero"))
    check_env_specs(env)
    if limit is None:
        check_language_env(env)
    with pytest.raises(KeyError, match="missing='zero'"):
        TransformedEnv(wordle(4), KLConstrainedTransform(frozen)).rollout(2)
    assert (env.reset()["kl"] == 0).all()


def test_a_penalty_of_the_steps_is_not_taken_off_the_rows_again():
    """Where a collector has taken it off; an environment's: ``tests/data/test_rollouts.py``."""
    base = wordle(8)
    policy, frozen = moved(base)
    transform = KLConstrainedTransform(frozen, 0.5)
    collector = Collector(base, policy, postproc=transform, **OPTIONS | {"frames_per_batch": 96})
    rows = EpisodeRows(carry=["token_log_prob"])(next(iter(collector)))
    collector.shutdown()
    assert len(rows)
    assert (rows["token_reward"] != rows["raw_reward"]).any(-1).all()
    again = KLConstrainedTransform(RowReference(frozen), 0.5)
    with pytest.raises(ValueError, match=r"'token_reward' was adjusted before.*count twice.*reward_key=None"):
        again(rows)
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(rows)), batch_size=2)
    buffer.append_transform(again)
    buffer.extend(rows)
    with pytest.raises(ValueError, match="count twice"):
        buffer.sample()
