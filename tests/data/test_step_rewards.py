"""Rows take the reward that the policy was given, whatever transforms made of the environment's."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import (
    BinarizeReward,
    DTypeCastTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    Transform,
    TransformedEnv,
    UnaryTransform,
)
from torchrl.envs.transforms import ClipTransform, Compose, VecNormV2

from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import TokenEnv, WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.transforms import KLConstrainedTransform, LivingCost, RowReference, frozen_copy

WORDS = ["crane", "slate", "purge", "mouse"]


def reply(td):
    """A policy without a random stream: what it writes depends on the row."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    return td.set("action", (written + torch.arange(4)) % 4)


class Noise(Transform):
    """Other amounts in every step and environment, some of them huge, so that nothing cancels."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self.generator = torch.Generator().manual_seed(0)

    def _apply_transform(self, reward):
        return torch.randn(reward.shape, generator=self.generator) * 100.0


TRANSFORMS = {
    "RewardScaling": lambda: RewardScaling(0.0, 10.0),
    "RewardScaling, loc": lambda: RewardScaling(3.0, 0.3),
    "RewardClipping": lambda: RewardClipping(-0.2, 0.3),
    "ClipTransform": lambda: ClipTransform(in_keys=["reward"], low=0.0, high=0.1),
    "SignTransform": lambda: SignTransform(in_keys=["reward"]),
    "BinarizeReward": lambda: BinarizeReward(),
    "VecNormV2": lambda: VecNormV2(in_keys=["reward"]),
    "UnaryTransform": lambda: UnaryTransform(in_keys=["reward"], out_keys=["reward"], fn=lambda r: r * r + 1),
    "DTypeCastTransform": lambda: Compose(
        DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"]), RewardScaling(0.0, 7.0)
    ),
    "several": lambda: Compose(LivingCost(0.25), RewardScaling(0.0, 2.0), RewardClipping(-1.0, 0.5), RewardSum()),
    "noise": lambda: Noise(),
}


def turn_sums(rows, steps_of_row):
    """What the tokens of each turn earned in the row, turn by turn; turns are windows between the steps' lengths."""
    sums = []
    for row, steps in zip(rows, steps_of_row, strict=True):
        before, after = steps["attention_mask"].sum(-1).tolist(), steps["next", "attention_mask"].sum(-1).tolist()
        sums.append([row["token_reward"][a:b].sum().item() for a, b in zip(before, after, strict=True)])
    return sums


def episodes(rollout):
    """The steps of each finished episode, in the order in which rows come."""
    for steps in rollout.unbind(0):
        begin = 0
        for end in steps["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            yield steps[begin : end + 1]
            begin = end + 1


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_turn_earns_what_its_step_did(name, talk):
    env = TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), TRANSFORMS[name]())
    rollout = env.rollout(12, reply, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    own = rows_from_rollout(rollout, unfinished="drop", reward_key=None)
    played = list(episodes(rollout))
    assert len(rows) == len(played) > 3
    for found, steps in zip(turn_sums(rows, played), played, strict=True):
        torch.testing.assert_close(torch.tensor(found), steps["next", "reward"].flatten().float())
    assert not torch.equal(rows["token_reward"], own["token_reward"])
    assert torch.equal(own["token_reward"], rollout["next", "token_reward"][rollout["next", "done"].squeeze(-1)])
    # Only the last token of a turn is paid.
    agent = rows["agent_mask"]
    last = agent & ~torch.cat([agent[:, 1:], torch.zeros_like(agent[:, :1])], 1)
    assert not rows["token_reward"][~last].any()


def rewards_in_a_collector(transform, turns, talk):
    env = TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), transform)
    collector = Collector(env, reply, frames_per_batch=3 * turns, total_frames=36)
    rows_of, batches = EpisodeRows(), []
    for steps in collector:
        batches.append(rows_of(steps).clone())
    collector.shutdown()
    return torch.cat([rows for rows in batches if len(rows)])


@pytest.mark.parametrize("name", ["RewardScaling", "RewardScaling, loc", "VecNormV2", "several", "noise"])
@pytest.mark.parametrize("turns", [1, 4])
def test_episodes_over_several_batches_too(name, turns, talk):
    """The first turns of an episode were given in an earlier batch: their rewards are not lost."""
    env = TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), TRANSFORMS[name]())
    rollout = env.rollout(12, reply, break_when_any_done=False)
    expected = rows_from_rollout(rollout, unfinished="drop")
    rows = rewards_in_a_collector(TRANSFORMS[name](), turns, talk)
    assert len(rows) == len(expected)
    assert rows["token_reward"].sum() == pytest.approx(expected["token_reward"].sum().item(), rel=1e-5)
    for row in rows:
        same = (expected["tokens"] == row["tokens"]).all(-1)
        near = (expected["token_reward"][same] - row["token_reward"]).abs().amax(-1)
        assert near.min() < 1e-4


def test_what_is_not_changed_comes_back_bit_by_bit(talk):
    """RewardSum sums up beside the reward; turn rewards write the row themselves; TokenEnv pays single tokens."""
    games = [
        TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), RewardSum()),
        TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), Compose(LivingCost(0.1), LivingCost(0.7))),
    ]
    for env in games:
        rollout = env.rollout(12, reply, break_when_any_done=False)
        ends = rollout["next", "done"].squeeze(-1)
        rows = rows_from_rollout(rollout, unfinished="drop")
        assert torch.equal(rows["token_reward"], rollout["next", "token_reward"][ends])
        assert "raw_reward" not in rows.keys()
    torch.manual_seed(0)
    tokens = TransformedEnv(TokenEnv(WordleEnv(WORDS, batch_size=[4], seed=0)), RewardScaling(0.0, 10.0))
    rollout = tokens.rollout(40, break_when_any_done=False)
    given = rows_from_rollout(rollout, unfinished="truncate")
    own = rows_from_rollout(rollout, unfinished="truncate", reward_key=None)
    assert own["token_reward"].sum() < 0
    torch.testing.assert_close(given["token_reward"], 10 * own["token_reward"])


def test_rounding_of_turns_whose_tokens_are_paid_singly_changes_nothing():
    """0.1 + 0.2 is not 0.3 in float32 whatever the order: the row stays as it is; a real difference is added."""
    attention = torch.tensor([[[True] + 5 * [False]]])
    reward = torch.tensor([[[0.0, 0.1, 0.2, 0.7, 0.05, 0.0]]])
    agent = reward > 0
    end = torch.ones(1, 1, 1, dtype=torch.bool)
    step = TensorDict(tokens=torch.arange(6).view(1, 1, 6), attention_mask=attention | True, agent_mask=agent,
                      token_reward=reward, done=end, terminated=end)  # fmt: skip
    for total, expected in ((1.05, 0.05), (1.05 + 1e-6, 0.05), (2.05, 1.05)):
        step["reward"] = torch.tensor([[[total]]])
        rollout = TensorDict({"attention_mask": attention, "next": step}, batch_size=[1, 1])
        rows = rows_from_rollout(rollout, unfinished="drop")
        if expected == 0.05:
            assert torch.equal(rows["token_reward"], reward[0])
        assert rows["token_reward"][0, 4] == pytest.approx(expected, abs=1e-6)


def hand_made(agent_mask, reward):
    """One episode of two turns, ``0 | 1 2 | 3 4``, and the rewards of its steps."""
    lengths = torch.tensor([1, 3, 5])
    real = torch.arange(5) < lengths[:, None]
    agent = torch.tensor(agent_mask, dtype=torch.bool) & real
    done = torch.tensor([[[False], [True]]])
    step = TensorDict(tokens=torch.arange(5).expand(1, 2, 5), attention_mask=real[None, 1:],
                      agent_mask=agent[None, 1:], token_reward=torch.zeros(1, 2, 5),
                      reward=torch.tensor(reward).view(1, 2, 1), done=done, terminated=done)  # fmt: skip
    return TensorDict({"attention_mask": real[None, :-1], "next": step}, batch_size=[1, 2])


def test_a_turn_in_which_the_agent_writes_nothing():
    rows = rows_from_rollout(hand_made([0, 1, 1, 0, 0], [1.0, 2.0]), unfinished="drop")
    assert rows["token_reward"].tolist() == [[0.0, 0.0, 3.0, 0.0, 0.0]]
    with pytest.raises(
        ValueError, match=r"1 steps have another 'reward'.*no token yet to place it on.*reward_key=None"
    ):
        rows_from_rollout(hand_made([0, 0, 0, 1, 1], [1.0, 2.0]), unfinished="drop")
    rows = rows_from_rollout(hand_made([0, 0, 0, 1, 1], [0.0, 2.0]), unfinished="drop")
    assert rows["token_reward"].tolist() == [[0.0, 0.0, 0.0, 0.0, 2.0]]


def test_changed_rewards_of_a_first_turn_that_is_not_there(talk):
    env = TransformedEnv(talk(seed=0, batch_size=[8], row_length=40), RewardScaling(0.0, 10.0))
    rollout = env.rollout(12, reply, break_when_any_done=False)
    with pytest.raises(ValueError, match=r"episodes began before this batch.*EpisodeRows"):
        rows_from_rollout(rollout[:, 1:], unfinished="drop")
    assert len(rows_from_rollout(rollout[:, 1:], unfinished="drop", reward_key=None)) > 8
    plain = talk(seed=0, batch_size=[8], row_length=40).rollout(12, reply, break_when_any_done=False)
    assert len(rows_from_rollout(plain[:, 1:], unfinished="drop")) > 8


def test_rewards_that_cannot_be_used_are_named(talk):
    rollout = talk(seed=0, batch_size=[3], row_length=40).rollout(12, reply, break_when_any_done=False)
    with pytest.raises(KeyError, match=r"needs 'score', found only.*reward_key=None"):
        rows_from_rollout(rollout, unfinished="drop", reward_key="score")
    rollout["next", "score"] = torch.zeros(3, 12, 2)
    with pytest.raises(ValueError, match=r"'score' must be one number per step, \[3, 12, 1\], got \[3, 12, 2\]"):
        rows_from_rollout(rollout, unfinished="drop", reward_key="score")
    rollout["next", "score"] = torch.full((3, 12, 1), 2.5)
    rows = rows_from_rollout(rollout, unfinished="drop", reward_key="score")
    steps = torch.tensor([len(steps) for steps in episodes(rollout)])
    torch.testing.assert_close(rows["token_reward"].sum(-1), 2.5 * steps)


def policy_and_reference(env):
    torch.manual_seed(0)
    actor = language_actor(causal_lm(vocab_size=35, layers=1, width=16, heads=2, max_length=96))
    policy = UtteranceActor(actor, env.tokenizer.control, 6, seed=0)
    frozen = frozen_copy(policy)
    with torch.no_grad():
        actor[1].module.weight.add_(0.1 * torch.randn_like(actor[1].module.weight))
    return policy, frozen


def test_a_penalty_in_the_environment_reaches_the_rows_once():
    base = WordleEnv(WORDS, batch_size=[6], seed=0)
    policy, frozen = policy_and_reference(base)
    env = TransformedEnv(base, Compose(LivingCost(0.5), KLConstrainedTransform(frozen, 0.5)))
    steps = env.rollout(12, policy, break_when_any_done=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"])
    played = list(episodes(steps))
    for name, key in (("token_reward", "reward"), ("raw_reward", "raw_reward")):
        expected = torch.stack([steps["next", key].sum() for steps in played])
        torch.testing.assert_close(rows[name].sum(-1), expected, rtol=1e-4, atol=1e-4)
    assert ((rows["token_reward"] - rows["raw_reward"]).abs().sum(-1) > 0).all()
    own = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"], reward_key=None)
    assert torch.equal(rows["raw_reward"], own["token_reward"])
    again = KLConstrainedTransform(RowReference(frozen), 0.5)
    with pytest.raises(ValueError, match="adjusted before"):
        again(rows)
    # Chosen by hand, the penalty is that of the rows alone, and the same in sum.
    torch.testing.assert_close(again(own)["token_reward"].sum(-1), rows["token_reward"].sum(-1), rtol=1e-3, atol=1e-3)


def test_a_penalty_in_the_environment_reaches_the_rows_of_a_collector():
    base = WordleEnv(WORDS, batch_size=[6], seed=0)
    policy, frozen = policy_and_reference(base)
    env = TransformedEnv(base, KLConstrainedTransform(frozen, 0.5))
    collector = Collector(env, policy, frames_per_batch=18, total_frames=72, auto_register_policy_transforms=False)
    rows_of = EpisodeRows(carry={"token_log_prob": "token_log_prob", "kl": ("next", "kl")})
    rows = torch.cat([rows for rows in map(rows_of, collector) if len(rows)])
    collector.shutdown()
    assert len(rows) > 6
    expected = rows["raw_reward"].sum(-1) - 0.5 * rows["kl"].sum(-1)
    torch.testing.assert_close(rows["token_reward"].sum(-1), expected, rtol=1e-4, atol=1e-4)


def test_other_shapes_of_batches(talk):
    """Environments in two dimensions, and rewards without their last dimension."""
    env = TransformedEnv(talk(seed=0, batch_size=[2, 3], row_length=40), RewardScaling(0.0, 10.0))
    rollout = env.rollout(12, reply, break_when_any_done=False)
    given = rows_from_rollout(rollout, unfinished="drop")
    own = rows_from_rollout(rollout, unfinished="drop", reward_key=None)
    torch.testing.assert_close(given["token_reward"], 10 * own["token_reward"])
    rollout["next", "reward"] = rollout["next", "reward"].squeeze(-1)
    assert torch.equal(rows_from_rollout(rollout, unfinished="drop")["token_reward"], given["token_reward"])
