"""A penalty taken off the steps of an environment is in the rows made of them, and is not taken off again."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv

from tests.transforms.test_rows import drift, speaker, wordle
from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.transforms import KLConstrainedTransform, KLRewardTransform, RowReference, frozen_copy

COEF = 0.5


def collected(make_transform, place, convert):
    """Rows of one batch under a policy that has moved, and the policy as it was."""
    base = wordle(8)
    policy = speaker(base)
    frozen = frozen_copy(policy)
    transform = make_transform(policy)
    drift(policy)
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


@pytest.mark.parametrize("convert", CONVERTERS)
@pytest.mark.parametrize("place", ["env", "postproc"])
@pytest.mark.parametrize("kind", [KLConstrainedTransform, KLRewardTransform])
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


def test_rows_of_the_environments_own_rewards_are_penalised_once():
    def both(steps):
        options = {"unfinished": "drop", "carry": ["token_log_prob"]}
        return rows_from_rollout(steps, **options), rows_from_rollout(steps, reward_key=None, **options)

    (given, own), frozen = collected(lambda policy: KLConstrainedTransform(policy, COEF), "env", both)
    found = KLConstrainedTransform(RowReference(frozen), COEF)(own)
    assert torch.equal(found["raw_reward"], given["raw_reward"])
    total, expected = (rows["token_reward"].sum(-1) for rows in (found, given))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_a_second_reference_under_its_own_name_may_follow_on_the_rows():
    rows, frozen = collected(lambda policy: KLConstrainedTransform(policy, COEF), "env", CONVERTERS["rollout"])
    out = KLConstrainedTransform(RowReference(frozen), COEF, name="style")(rows)
    assert torch.equal(out["style_raw_reward"], rows["token_reward"])
    torch.testing.assert_close(out["token_reward"], rows["token_reward"] - COEF * out["style_kl"])
    with pytest.raises(ValueError, match="count twice"):
        KLConstrainedTransform(RowReference(frozen), COEF, name="style")(out)
