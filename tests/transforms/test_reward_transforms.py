"""Transforms of TorchRL and ours that write the reward of a step: what they make of the reward is in the rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import transforms

from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.transforms import EntryReward, LivingCost

WORDS = ["crane", "slate", "purge", "mouse", "flint", "bound"]


class _Float(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 3)

    def forward(self, tokens):
        return self.linear(tokens.float().mean(-1, keepdim=True))


def in_float64(*more):
    return transforms.Compose(transforms.DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"]), *more)


WRITE = {
    "Compose": lambda: transforms.Compose(transforms.RewardScaling(0.5, 3.0), transforms.RewardClipping(-1.0, 0.7)),
    "DTypeCastTransform": lambda: in_float64(transforms.RewardScaling(0.1, 7.0)),
    "FrameSkipTransform": lambda: transforms.FrameSkipTransform(3),
    "RNDTransform": lambda: transforms.RNDTransform(
        _Float(), _Float(), in_keys=["tokens"], out_keys=["reward"], normalize_obs=False
    ),
    "SuccessReward": lambda: transforms.SuccessReward("terminated", scale=4.0),
    "VecNormV2": lambda: transforms.VecNormV2(in_keys=["reward"]),
}
OURS = {
    "LivingCost": lambda: LivingCost(0.25),
    "LivingCost of float64": lambda: in_float64(LivingCost(0.25)),
    "EntryReward": lambda: EntryReward({"terminated": 3.0, "truncated": -2.0}),
}


def play(transform, seed=0):
    torch.manual_seed(seed)
    env = transforms.TransformedEnv(WordleEnv(WORDS, batch_size=[4], max_tries=3, seed=seed), transform)
    options = {"frames_per_batch": 28, "total_frames": 56, "auto_register_policy_transforms": False}
    collector = Collector(env, RandomWordPlayer(WORDS, seed=seed), **options)
    batches = [steps.clone() for steps in collector]
    collector.shutdown()
    return batches


@pytest.mark.parametrize("name", [*WRITE, *OURS])
def test_rows_sum_to_the_reward_of_the_steps(name):
    batches = play((WRITE | OURS)[name]())
    rows_of = EpisodeRows()
    rows = torch.cat([rows_of(steps) for steps in batches])
    own = EpisodeRows(reward_key=None)
    unchanged = torch.cat([own(steps) for steps in batches])
    steps = torch.cat(batches, 1).reshape(-1)
    trajectory = steps["collector", "traj_ids"]
    ended = trajectory[steps["next", "done"].squeeze(-1)]
    expected = torch.stack([steps["next", "reward"][trajectory == number].sum() for number in ended]).float()
    assert len(rows) == len(ended) > 12
    totals = rows["token_reward"].sum(-1)
    torch.testing.assert_close(totals.sort().values, expected.sort().values, rtol=1e-5, atol=1e-4)
    # Ours write the rows themselves; FrameSkipTransform plays several turns a step, each of which pays its own token.
    same = name in OURS or name == "FrameSkipTransform"
    assert torch.equal(rows["token_reward"], unchanged["token_reward"]) is same
    # The other converter, on what is whole.
    first = rows_from_rollout(batches[0], unfinished="drop")
    assert len(first)
    for row in first:
        alike = (rows["tokens"] == row["tokens"]).all(-1)
        assert (rows["token_reward"][alike] - row["token_reward"]).abs().amax(-1).min() < 1e-4
