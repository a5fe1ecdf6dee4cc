"""Turns of a language environment under a reference, token by token, where environments and collectors stand."""

from __future__ import annotations

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.test_rows import drift, speaker, wordle
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import check_language_env
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    ReferenceModelLogProbTransform,
    RowReference,
    frozen_copy,
)


def drifted(env, **options):
    policy = speaker(env, **options)
    frozen = frozen_copy(policy)
    drift(policy)
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


def test_a_collector_hands_on_rows_through_its_postproc():
    """The conversion and the penalty as one postproc: what a user writes in a line."""
    base = wordle(16)
    policy, frozen = drifted(base)
    transform = KLConstrainedTransform(RowReference(frozen), 0.1)
    collector = Collector(
        base,
        policy,
        frames_per_batch=16 * 3,
        total_frames=16 * 3 * 2,
        auto_register_policy_transforms=False,
        reset_at_each_iter=True,
        postproc=lambda steps: transform(rows_from_rollout(steps, unfinished="truncate", carry=["token_log_prob"])),
    )
    batches = list(collector)
    collector.shutdown()
    assert len(batches) == 2
    for rows in batches:
        assert rows["tokens"].shape[-1] == base.row_length
        difference = (rows["raw_reward"] - rows["token_reward"]).sum(-1)
        torch.testing.assert_close(difference, 0.1 * rows["kl"].sum(-1), atol=1e-4, rtol=1e-4)
        assert rows["kl"].sum(-1).mean() > 0
