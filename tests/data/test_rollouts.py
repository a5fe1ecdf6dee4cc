"""What a policy wrote for each token goes with the token into the row."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import MultiStep
from torchrl.envs import (
    DTypeCastTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    Transform,
    TransformedEnv,
)
from torchrl.envs.transforms import Compose

from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import TokenEnv, WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import from_row
from torchrl_lang.transforms import KLConstrainedTransform, LivingCost, RowReference, frozen_copy


def act(td):
    """A policy without a random stream: what it says hangs on the row."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    return td.set("action", (written + torch.arange(4)) % 4)


def test_the_last_observation_of_an_episode_is_its_row(talk):
    env = talk(seed=0, batch_size=[3], row_length=40)
    rollout = env.rollout(12, act, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    place = rollout["next", "done"].squeeze(-1).nonzero().tolist()
    assert rows.shape == (len(place),)
    assert len(place) > 3
    for row, (env_index, time) in zip(rows.unbind(0), place, strict=True):
        for key in (*ROW_KEYS, "terminated", "truncated"):
            assert torch.equal(row[key], rollout[env_index, time]["next", key])
        assert from_row(row, env.tokenizer).terminated


def test_unfinished_episodes_are_dropped_or_marked(talk):
    env = talk(seed=0, batch_size=[3], row_length=40, patience=1_000)
    rollout = env.rollout(2, act, break_when_any_done=False)
    assert rows_from_rollout(rollout, unfinished="drop").shape == (0,)
    rows = rows_from_rollout(rollout, unfinished="truncate")
    assert rows["truncated"].flatten().tolist() == [True] * 3
    assert not rows["terminated"].any()
    assert torch.equal(rows["tokens"], rollout[:, -1]["next", "tokens"])
    with pytest.raises(ValueError, match="unfinished must be one of"):
        rows_from_rollout(rollout, unfinished="ignore")


def test_by_hand():
    """Two episodes one after the other; the second one is still running."""
    attention = torch.tensor([[[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]]).bool()
    after = torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]]).bool()
    agent = torch.tensor([[[0, 1, 1, 0, 0], [0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]]).bool()
    done = torch.tensor([[[False], [True], [False]]])
    step = TensorDict(tokens=torch.arange(15).view(1, 3, 5), attention_mask=after, agent_mask=agent,
                      token_reward=torch.zeros(1, 3, 5), reward=torch.zeros(1, 3, 1), done=done,
                      terminated=done)  # fmt: skip
    said = torch.tensor([[[-1.0, -2.0], [-3.0, 9.0], [-4.0, 9.0]]])
    rollout = TensorDict({"attention_mask": attention, "said": said, "next": step}, batch_size=[1, 3])
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["said"])
    assert rows["said"].tolist() == [[0.0, -1.0, -2.0, 0.0, -3.0]]
    both = rows_from_rollout(rollout, unfinished="truncate", carry=["said"])
    assert both["said"][1].tolist() == [0.0, -4.0, 0.0, 0.0, 0.0]
    agent[0, :2, 3] = True  # a third token of the first turn, for which there is no value
    with pytest.raises(ValueError, match="1 of 1 episodes have tokens of the agent without 'said'"):
        rows_from_rollout(rollout, unfinished="drop", carry=["said"])


def test_what_is_not_there_raises(talk):
    env = talk(seed=0, batch_size=[8], row_length=40)
    rollout = env.rollout(12, speak, break_when_any_done=False)
    with pytest.raises(KeyError, match="needs 'log_prob'"):
        rows_from_rollout(rollout, unfinished="drop", carry=["log_prob"])
    with pytest.raises(ValueError, match="episodes began before this batch"):
        rows_from_rollout(rollout[:, 1:], unfinished="drop", carry=["figure"])


def speak(td):
    """Says the letters 0, 1, 2, ... from its place in the row on, each with its own place as its figure."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    place = written + torch.arange(4)
    return td.set("action", place % 4).set("figure", place.float() + 0.5).set("turn", written)


def batches(env, frames, batches_in_all):
    collector = Collector(env, speak, frames_per_batch=frames, total_frames=frames * batches_in_all)
    try:
        yield from collector
    finally:
        collector.shutdown()


def sorted_rows(rows):
    """In an order of their own, so that two ways of collecting compare."""
    keys = [tuple(row["tokens"].tolist() + row["token_reward"].tolist()) for row in rows]
    return rows[torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))]


@pytest.mark.parametrize("turns", [1, 3])
def test_batches_of_any_length_give_the_same_episodes(talk, turns):
    """As many as end in one long rollout; each figure stands where its token does."""
    env = functools.partial(talk, seed=0, batch_size=[3], row_length=40)
    rollout = env().rollout(12, speak, break_when_any_done=False)
    expected = rows_from_rollout(rollout, unfinished="drop", carry=["figure"])
    rows_of = EpisodeRows(carry=["figure"])
    found = [rows_of(steps) for steps in batches(env(), 3 * turns, 12 // turns)]
    got = torch.cat([rows for rows in found if len(rows)])
    assert len(expected) > 6
    assert rows_of.waiting == 3 - int(rollout["next", "done"][:, -1].sum())
    for key in expected.keys():
        assert torch.equal(sorted_rows(got)[key], sorted_rows(expected)[key]), key


def test_waiting_episodes_are_followed_to_their_end(talk):
    """All that begin in the first two turns come out, the long ones too, and none that begins later."""
    env = functools.partial(talk, seed=0, batch_size=[16], row_length=60)
    rollout = env().rollout(12, speak, break_when_any_done=False)
    done = rollout["next", "done"].squeeze(-1)
    late = done & (torch.arange(done.shape[1]) >= 1)  # one of these ends may lie behind those turns
    expected = rollout["next"][done & (late.cumsum(1) <= 1)]
    rows_of, found = EpisodeRows(carry=["figure"]), []
    for steps in batches(env(), 32, 6):
        found.append(rows_of(steps, only_waiting=bool(found)))
        if not rows_of.waiting:
            break
    got = torch.cat(found)
    assert rows_of.waiting == 0
    assert len(got) == len(expected) >= 16
    assert torch.equal(sorted_rows(got)["tokens"], sorted_rows(expected)["tokens"])
    after = rows_of(steps, only_waiting=True)  # nobody waits
    assert (len(after), rows_of.waiting) == (0, 0)


def test_a_figure_a_turn_goes_to_all_its_tokens(talk):
    env = talk(seed=0, batch_size=[3], row_length=40)
    rows_of = EpisodeRows(carry={"when": "turn", "figure": "figure"})
    for steps in batches(env, 3, 8):
        rows = rows_of(steps)
        for row in rows:
            agent = row["agent_mask"]
            begins = agent & ~agent.roll(1)
            place = torch.arange(40)
            for p in place[agent].tolist():  # each token was said in the turn that began at or before it
                assert row["when"][p] <= p
                assert (row["figure"][p] - 0.5) == p
            assert torch.equal(row["when"][begins], place[begins])
            assert not row["when"][~agent].any()


@pytest.mark.parametrize("unfinished", ["truncate", "drop"])
def test_collectors_that_begin_anew_with_each_batch(talk, unfinished):
    """Nothing waits; what is cut is a truncated row, or none."""
    env = talk(seed=0, batch_size=[16], row_length=60, patience=6)
    collector = Collector(env, speak, frames_per_batch=48, total_frames=480, reset_at_each_iter=True)
    rows_of = EpisodeRows(carry=["figure"], unfinished=unfinished)
    place = torch.arange(60) + 0.5
    for steps in collector:
        rows = rows_of(steps)
        assert rows_of.waiting == 0
        done = steps["next", "done"].squeeze(-1)
        assert len(rows) == int(done.sum()) + (unfinished == "truncate") * int((~done[:, -1]).sum())
        assert int(rows["truncated"].sum()) == len(rows) - int(done.sum())
        assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], place, 0.0))
    collector.shutdown()


def test_waiting_for_what_does_not_come_is_noticed(talk, monkeypatch):
    monkeypatch.setattr("torchrl_lang.data.rollouts._MOST_BATCHES", 4)
    env = talk(seed=0, batch_size=[16], row_length=60, patience=6)
    collector = Collector(env, speak, frames_per_batch=16, total_frames=160, reset_at_each_iter=True)
    rows_of = EpisodeRows()
    with pytest.raises(RuntimeError, match=r"episodes of more than 4 batches wait.*unfinished='truncate'"):
        list(map(rows_of, collector))
    collector.shutdown()
    with pytest.raises(ValueError, match="unfinished must be one of"):
        EpisodeRows(unfinished="keep")


# -- components of TorchRL before the conversion -----------------------------------------------------------------------

CONVERSIONS = {
    "rollout": lambda steps, **options: rows_from_rollout(steps, unfinished="drop", **options),
    "episodes": lambda steps, **options: EpisodeRows(**options)(steps),
}


def collected(env, policy, **options):
    collector = Collector(env, policy, frames_per_batch=96, total_frames=96, **options)
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_multi_step_is_refused(talk, convert):
    """Unless it looks one step ahead, which changes nothing."""
    env = talk(seed=0, batch_size=[8], row_length=40)
    steps = collected(env, speak)
    expected = convert(steps)
    with pytest.raises(ValueError, match="MultiStep has changed these steps"):
        convert(MultiStep(gamma=0.9, n_steps=2)(steps))
    assert torch.equal(convert(MultiStep(gamma=0.9, n_steps=1)(steps))["token_reward"], expected["token_reward"])


def certain(td):
    """Says "a" or "b" by its place in the row, then the end, each with a probability of one."""
    end, pad = 5, 4
    letter = (td["attention_mask"].sum(-1, keepdim=True) // 2) % 2
    rest = torch.tensor([end, pad, pad]).expand(*td.batch_size, 3)
    return td.set("action", torch.cat([letter, rest], -1)).set("token_log_prob", torch.zeros(*td.batch_size, 4))


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_log_probabilities_of_random_frames_are_refused(talk, convert):
    """A policy that is certain of its tokens also writes zeros; random actions without log-probabilities are rows."""
    env = talk(seed=0, batch_size=[8], row_length=40)
    control = env.tokenizer.control
    assert (control.end_of_action, control.pad) == (5, 4)
    steps = collected(env, certain, init_random_frames=96)
    assert not steps["token_log_prob"].any()
    with pytest.raises(ValueError, match=r"'token_log_prob' is 0.*collect with init_random_frames=0"):
        convert(steps, carry=["token_log_prob"])
    assert len(convert(steps)) > 6
    assert len(convert(collected(env, certain), carry=["token_log_prob"])) > 6
    mixed = torch.cat([collected(env, certain), steps[:, :4]], -1)  # a few random steps are found among others
    mixed["collector", "traj_ids"] = torch.cat(
        [mixed["collector", "traj_ids"][:, :-4], 1_000 + steps["collector", "traj_ids"][:, :4]], -1
    )
    with pytest.raises(ValueError, match="which stands for a probability of one"):
        convert(mixed, carry=["token_log_prob"])


@pytest.mark.parametrize("unfinished", ["drop", "truncate"])
def test_padded_steps_are_no_steps(talk, unfinished):
    """``split_trajs`` pads trajectories with zeros, trajectory numbers among them."""
    env = functools.partial(talk, seed=0, batch_size=[8], row_length=40)
    whole, split = collected(env(), speak), collected(env(), speak, split_trajs=True)
    assert not split["collector", "mask"].all()
    expected = rows_from_rollout(whole, unfinished=unfinished, carry=["figure"])
    for found in (
        rows_from_rollout(split, unfinished=unfinished, carry=["figure"]),
        EpisodeRows(carry=["figure"], unfinished=unfinished)(split),
    ):
        for key in expected.keys():
            assert torch.equal(sorted_rows(found)[key], sorted_rows(expected)[key]), key


class Noise(Transform):
    """Other amounts in every step and environment, some of them huge, so that nothing cancels."""

    def __init__(self):
        super().__init__(in_keys=["reward"], out_keys=["reward"])
        self.generator = torch.Generator().manual_seed(0)

    def _apply_transform(self, reward):
        return torch.randn(reward.shape, generator=self.generator) * 100.0


TRANSFORMS = {
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
    rollout = env.rollout(12, act, break_when_any_done=False)
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


def test_episodes_over_several_batches_too(talk):
    """The first turns of an episode were given in an earlier batch: their rewards are not lost."""

    def env():
        return TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), Noise())

    expected = rows_from_rollout(env().rollout(12, act, break_when_any_done=False), unfinished="drop")
    collector, rows_of = Collector(env(), act, frames_per_batch=12, total_frames=36), EpisodeRows()
    rows = torch.cat([rows for rows in [rows_of(steps).clone() for steps in collector] if len(rows)])
    collector.shutdown()
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
        rollout = env.rollout(12, act, break_when_any_done=False)
        ends = rollout["next", "done"].squeeze(-1)
        rows = rows_from_rollout(rollout, unfinished="drop")
        assert torch.equal(rows["token_reward"], rollout["next", "token_reward"][ends])
        assert "raw_reward" not in rows.keys()
    torch.manual_seed(0)
    tokens = TransformedEnv(
        TokenEnv(WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[4], seed=0)), RewardScaling(0.0, 10.0)
    )
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
        ValueError, match=r"1 steps have another 'reward'.*no token of the agent to place it on.*reward_key=None"
    ):
        rows_from_rollout(hand_made([0, 0, 0, 1, 1], [1.0, 2.0]), unfinished="drop")
    rows = rows_from_rollout(hand_made([0, 0, 0, 1, 1], [0.0, 2.0]), unfinished="drop")
    assert rows["token_reward"].tolist() == [[0.0, 0.0, 0.0, 0.0, 2.0]]


def test_changed_rewards_of_a_first_turn_that_is_not_there(talk):
    env = TransformedEnv(talk(seed=0, batch_size=[8], row_length=40), RewardScaling(0.0, 10.0))
    rollout = env.rollout(12, act, break_when_any_done=False)
    with pytest.raises(ValueError, match=r"episodes began before this batch.*EpisodeRows"):
        rows_from_rollout(rollout[:, 1:], unfinished="drop")
    assert len(rows_from_rollout(rollout[:, 1:], unfinished="drop", reward_key=None)) > 8
    plain = talk(seed=0, batch_size=[8], row_length=40).rollout(12, act, break_when_any_done=False)
    assert len(rows_from_rollout(plain[:, 1:], unfinished="drop")) > 8


def test_rewards_that_cannot_be_used_are_named(talk):
    rollout = talk(seed=0, batch_size=[3], row_length=40).rollout(12, act, break_when_any_done=False)
    with pytest.raises(KeyError, match=r"needs \('next', 'score'\), found only.*reward_key="):
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
    base = WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[6], seed=0)
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


class FixedWord:
    """Says a fixed word, with its letters' places as figures; importable, for the workers."""

    def __call__(self, td):
        action = torch.tensor([2, 17, 0, 13, 4, 31]).expand(*td.batch_size, 6)
        place = td["attention_mask"].sum(-1, keepdim=True) + torch.arange(6)
        return td.set("action", action.clone()).set("figure", place.float() + 0.5)


def wordle(seed):
    return WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[5], seed=seed)


@pytest.mark.slow
def test_episodes_of_several_workers_are_told_apart():
    makers, options = [functools.partial(wordle, seed) for seed in range(2)], {"auto_register_policy_transforms": False}
    collector = MultiAsyncCollector(makers, FixedWord(), frames_per_batch=20, total_frames=160, **options)
    rows_of, found = EpisodeRows(carry=["figure"]), []
    try:
        for steps in collector:
            found.append(rows_of(steps))
    finally:
        collector.shutdown()
    rows = torch.cat([rows for rows in found if len(rows)])
    assert len(rows) >= 15
    assert rows["terminated"].all()
    place = torch.arange(rows["tokens"].shape[-1]) + 0.5
    assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], place, 0.0))
