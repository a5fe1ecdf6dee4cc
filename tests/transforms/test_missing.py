"""Data without what is needed: a clear error, or zero where that was asked for."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import drift, frozen_twin, log_prob_by_hand, make_actor, make_env, play
from torchrl_lang.transforms import (
    ColumnReference,
    FunctionReference,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)


def test_random_policy_is_an_error(kind):
    env = TransformedEnv(make_env(kind, (3,)), KLConstrainedTransform(make_actor(kind)))
    with pytest.raises(KeyError, match=r"return_log_prob=True.*missing="):
        env.rollout(2)


def test_random_policy_costs_nothing_when_told_so(kind):
    env = TransformedEnv(make_env(kind, (3,)), KLConstrainedTransform(make_actor(kind), missing="zero"))
    check_env_specs(env)
    out = env.rollout(2)["next"]
    out = out["agents"] if kind == "agents" else out
    assert (out["kl"] == 0).all()
    assert torch.equal(out["reward"], out["raw_reward"])
    assert (out["ref_log_prob"] != 0).all()


def test_the_plain_transform_scores_random_actions_by_the_actor_as_it_is_now(kind):
    """So ``check_env_specs``, which acts at random, needs no option, and nothing is left out."""
    actor = make_actor(kind)
    transform = KLRewardTransform(actor)
    env = TransformedEnv(make_env(kind, (3,)), transform)
    before = frozen_twin(actor)
    check_env_specs(env)
    drift(actor)
    check_env_specs(env)
    steps = env.rollout(2)
    kl = log_prob_by_hand(kind, actor, steps) - log_prob_by_hand(kind, before, steps)
    torch.testing.assert_close(steps["next", *_path(kind, "kl")], kl, rtol=1e-3, atol=1e-3)
    assert kl.abs().sum() > 0


def _path(kind, name):
    return ("agents", name) if kind == "agents" else (name,)


def test_zero_applies_to_what_is_missing_alone():
    """An actor with log-probabilities pays as ever."""
    actor = make_actor("tanh-normal")
    env = TransformedEnv(make_env("tanh-normal", (3,)), KLConstrainedTransform(actor, missing="zero"))
    drift(actor)
    assert (play(env, actor)["next", "kl"] != 0).all()


def test_the_policy_is_asked_where_the_data_is_silent():
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, policy=actor)
    drift(actor)
    steps = play(make_env("tanh-normal", (3,)), actor)
    expected = transform(steps)["next", "kl"]
    assert (expected != 0).all()
    asked = transform(steps.exclude("action_log_prob"))["next", "kl"]
    torch.testing.assert_close(asked, expected, rtol=1e-4, atol=1e-4)


STEP = {"ref_log_prob": torch.zeros(2), "action_log_prob": torch.zeros(2), "reward": torch.zeros(2, 1)}


@pytest.mark.parametrize(
    ("transform", "lacks", "message"),
    [
        (ReferenceModelLogProbTransform(make_actor("tanh-normal")), "observation", "reference needs 'observation'"),
        (ReferenceModelLogProbTransform(ColumnReference("stored")), "stored", "needs 'stored'"),
        (KLDivergenceTransform(), "ref_log_prob", "Put ReferenceModelLogProbTransform before"),
        (KLDivergenceTransform(mask_key="mask"), "mask", "tokens that count"),
        (KLDivergenceTransform(log_prob_key="mine"), "mine", "log_prob_key="),
        (RewardAdjustmentTransform(), "kl", "Put KLDivergenceTransform before"),
        (RewardAdjustmentTransform(kl_key="ref_log_prob", reward_key="score"), "score", "reward_key="),
    ],
)
def test_a_missing_entry_is_named(transform, lacks, message):
    data = TensorDict({key: value for key, value in STEP.items() if key != lacks}, batch_size=[2])
    with pytest.raises(KeyError, match=message):
        transform(data)


def test_a_wrong_order_is_found_when_the_environment_is_built():
    env = TransformedEnv(make_env("tanh-normal"), KLDivergenceTransform())
    with pytest.raises(KeyError, match="put ReferenceModelLogProbTransform before"):
        env.reset()
    env = TransformedEnv(make_env("tanh-normal"), KLConstrainedTransform(make_actor("tanh-normal"), in_keys="score"))
    with pytest.raises(KeyError, match="no reward 'score'"):
        env.reset()


def test_other_references_agree_with_the_actor():
    """A column and functions."""
    actor = make_actor("tanh-normal")
    twin = frozen_twin(actor)
    drift(actor)
    steps = play(make_env("tanh-normal", (3,)), actor)
    expected = log_prob_by_hand("tanh-normal", twin, steps)
    stored = steps.copy().set("stored", expected)
    by_hand = FunctionReference(lambda td: log_prob_by_hand("tanh-normal", twin, td), in_keys=["observation", "action"])
    for reference, data in (
        ("stored", stored),
        (by_hand, steps),
        (lambda td: log_prob_by_hand("tanh-normal", twin, td), steps),
    ):
        out = ReferenceModelLogProbTransform(reference)(data)
        torch.testing.assert_close(out["next", "ref_log_prob"], expected, rtol=1e-3, atol=1e-3)
    env = TransformedEnv(make_env("tanh-normal", (3,)), KLConstrainedTransform(by_hand, missing="zero"))
    check_env_specs(env)
    assert (play(env, actor)["next", "kl"] != 0).all()
