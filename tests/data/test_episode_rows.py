"""Whole episodes out of batches that begin and end anywhere."""

from __future__ import annotations

import functools

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import MultiStep

from torchrl_lang.data import EpisodeRows, rows_from_rollout
from torchrl_lang.envs import WordleEnv

WORDS = ["crane", "slate", "purge", "mouse"]


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


@pytest.mark.parametrize("turns", [1, 2, 3, 12])
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


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_waiting_episodes_are_followed_to_their_end(talk, turns):
    """All that begin in the first turns come out, the long ones too, and none that begins later."""
    env = functools.partial(talk, seed=0, batch_size=[16], row_length=60)
    rollout = env().rollout(12, speak, break_when_any_done=False)
    expected = rollout["next"][of_those_that_begin_within(turns, rollout["next", "done"].squeeze(-1))]
    rows_of, found = EpisodeRows(carry=["figure"]), []
    for steps in batches(env(), 16 * turns, 6):
        found.append(rows_of(steps, only_waiting=bool(found)))
        if not rows_of.waiting:
            break
    got = torch.cat(found)
    assert rows_of.waiting == 0
    assert len(got) == len(expected) >= 16
    assert torch.equal(sorted_rows(got)["tokens"], sorted_rows(expected)["tokens"])
    after = rows_of(steps, only_waiting=True)  # nobody waits
    assert (len(after), rows_of.waiting) == (0, 0)


def of_those_that_begin_within(turns, done):
    """Of the ends of episodes, bool ``[B, time]``: one of them may lie behind those turns, and none has begun there."""
    late = done & (torch.arange(done.shape[1]) >= turns - 1)
    return done & (late.cumsum(1) <= 1)


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


def test_further_entries_are_kept(talk):
    env = talk(seed=0, batch_size=[3], row_length=40)
    rows_of = EpisodeRows(keep=["done"])
    kept = [rows_of(steps) for steps in batches(env, 6, 4)]
    assert any(len(rows) for rows in kept)
    assert all(rows["done"].all() for rows in kept)


def test_forgetting_and_what_is_missing(talk):
    env = talk(seed=0, batch_size=[8], row_length=40)
    first, *later = batches(env, 8, 6)
    rows_of = EpisodeRows(carry=["figure"])
    rows_of(first)
    assert rows_of.waiting > 0
    rows_of.forget()
    assert rows_of.waiting == 0
    with pytest.raises(ValueError, match="episodes began before this batch"):
        list(map(rows_of, later))
    with pytest.raises(KeyError, match=r"EpisodeRows needs 'log_prob'"):
        EpisodeRows(carry=["log_prob"])(first)
    with pytest.raises(KeyError, match="TorchRL collector"):
        EpisodeRows()(env.rollout(2, speak))


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
    with pytest.raises(ValueError, match="unfinished='keep' is unknown"):
        EpisodeRows(unfinished="keep")


def test_a_reward_that_is_not_finite_is_refused(talk):
    rows_of = EpisodeRows()
    (steps,) = batches(talk(seed=0, batch_size=[8], row_length=40), 96, 1)
    steps["next", "reward"][2, 1] = float("nan")
    with pytest.raises(ValueError, match="a reward that is not finite"):
        rows_of(steps)


class Caller:
    """Says a fixed word, with its letters' places as figures; importable, for the workers."""

    def __call__(self, td):
        action = torch.tensor([2, 17, 0, 13, 4, 31]).expand(*td.batch_size, 6)
        place = td["attention_mask"].sum(-1, keepdim=True) + torch.arange(6)
        return td.set("action", action.clone()).set("figure", place.float() + 0.5)


def wordle(seed):
    return WordleEnv(WORDS, batch_size=[5], seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_episodes_of_several_workers_are_told_apart(kind):
    makers = [functools.partial(wordle, seed) for seed in range(2)]
    collector = kind(makers, Caller(), frames_per_batch=20, total_frames=160, auto_register_policy_transforms=False)
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
    with pytest.raises(ValueError, match="MultiStep has added the rewards of later steps"):
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
    with pytest.raises(ValueError, match=r"'token_log_prob' is 0.*Collect with init_random_frames=0"):
        convert(steps, carry=["token_log_prob"])
    assert len(convert(steps)) > 6
    assert len(convert(collected(env, certain), carry=["token_log_prob"])) > 6
    mixed = torch.cat([collected(env, certain), steps[:, :4]], -1)  # a few random steps are found among others
    mixed["collector", "traj_ids"] = torch.cat(
        [mixed["collector", "traj_ids"][:, :-4], 1_000 + steps["collector", "traj_ids"][:, :4]], -1
    )
    with pytest.raises(ValueError, match="at all tokens of"):
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
