"""Collectors with worker processes: the reference travels, the controller is shared."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import drift, make_actor, make_env
from tests.transforms.test_rows import jitter, speaker, wordle
from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import check_language_env
from torchrl_lang.transforms import (
    ConstantKLController,
    KLConstrainedTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RowReference,
    frozen_copy,
)


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

    One worker gets the transform, one builds it with its own reference.
    """
    actor, before = make_actor("tanh-normal"), make_actor("tanh-normal")
    controller = ConstantKLController(0.3).share_memory()
    transform = KLConstrainedTransform(actor, controller)
    drift(actor)
    makers = [functools.partial(transformed, transform), functools.partial(built_in_the_worker, controller)]
    collector = MultiSyncCollector(makers, actor, **OPTIONS)
    try:
        batches = iter(collector)
        for coef in (0.3, 0.05):
            controller.coef.fill_(coef)
            steps = next(batches)
            assert_adjusted(steps, before, coef)
    finally:
        collector.shutdown()


def drifted(env, **options):
    policy = speaker(env, **options)
    frozen = frozen_copy(policy)
    jitter(policy)
    return policy, frozen


def test_the_penalty_of_a_turn_is_the_sum_over_its_tokens():
    base = wordle(8)
    policy, frozen = drifted(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen, 0.5))
    steps = env.rollout(12, policy, break_when_any_done=False)
    step = steps["next"]
    assert step["kl"].shape == (8, 12, 6) == step["ref_log_prob"].shape
    torch.testing.assert_close(step["kl"], steps["token_log_prob"] - step["ref_log_prob"])
    expected = step["raw_reward"] - 0.5 * step["kl"].sum(-1, keepdim=True)
    torch.testing.assert_close(step["reward"], expected)
    rows = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"], reward_key=None)
    by_row = KLConstrainedTransform(RowReference(frozen), 0.5)(rows)
    ends = step["done"].squeeze(-1)
    total = torch.zeros(8)
    per_game = []
    for time in range(12):  # the turns of a game add up to the row
        total = total + step["kl"][:, time].sum(-1)
        per_game += [(env_index, time, float(total[env_index])) for env_index in ends[:, time].nonzero().flatten()]
        total = torch.where(ends[:, time], 0, total)
    per_game = torch.tensor([value for *_, value in sorted(per_game)])
    torch.testing.assert_close(by_row["kl"].sum(-1), per_game, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [None, 3.0])
def test_specs_and_the_contract_of_language_environments(limit):
    base = wordle(4)
    _, frozen = drifted(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen, limit=limit, missing="zero"))
    check_env_specs(env)
    if limit is None:
        check_language_env(env)
    with pytest.raises(KeyError, match="missing='zero'"):
        TransformedEnv(wordle(4), KLConstrainedTransform(frozen)).rollout(2)
    assert (env.reset()["kl"] == 0).all()


def test_turns_that_nobody_took_cost_nothing():
    """A row that is done stays silent, and so does the penalty."""
    base = wordle(8)
    policy, frozen = drifted(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen))
    step = env.step(policy(env.reset()))
    now = step["next"].exclude("reward", "raw_reward")
    now["done"] = torch.arange(8).unsqueeze(-1) < 4
    again = KLConstrainedTransform(frozen)(policy(now.clone()).set("next", step["next"].exclude("raw_reward", "kl")))
    assert (again["next", "kl"][:4] == 0).all()
    assert (again["next", "kl"][4:].abs().sum(-1) > 0).all()
    everyone = now.clone().set("done", torch.ones(8, 1, dtype=torch.bool))
    assert (ReferenceModelLogProbTransform(frozen)(policy(everyone))["ref_log_prob"] == 0).all()


COEF = 0.5


def collected(make_transform, place, convert):
    """Rows of one batch under a policy that has moved, and the policy as it was."""
    base = wordle(8)
    policy = speaker(base)
    frozen = frozen_copy(policy)
    transform = make_transform(policy)
    jitter(policy)
    env = TransformedEnv(base, transform) if place == "env" else base
    postproc = transform if place == "postproc" else None
    options = {"frames_per_batch": 96, "total_frames": 96, "auto_register_policy_transforms": False}
    collector = Collector(env, policy, postproc=postproc, **options)
    steps = next(iter(collector)).clone()
    collector.shutdown()
    return convert(steps), frozen


CONVERTERS = {
    "rollout": lambda steps: rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"]),
    "episodes": lambda steps: EpisodeRows(carry=["token_log_prob"])(steps),
}


@pytest.mark.parametrize(
    ("kind", "place", "convert"),
    [(KLConstrainedTransform, "env", "rollout"), (KLRewardTransform, "postproc", "episodes")],
)
def test_a_penalty_of_the_steps_is_not_taken_off_the_rows_again(kind, place, convert):
    rows, frozen = collected(lambda policy: kind(policy, COEF), place, CONVERTERS[convert])
    assert len(rows)
    assert (rows["token_reward"] != rows["raw_reward"]).any(-1).all()
    again = KLConstrainedTransform(RowReference(frozen), COEF)
    with pytest.raises(ValueError, match=r"'token_reward' was adjusted before.*count twice.*reward_key=None"):
        again(rows)
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(rows)), batch_size=2)
    buffer.append_transform(again)
    buffer.extend(rows)
    with pytest.raises(ValueError, match="count twice"):
        buffer.sample()
