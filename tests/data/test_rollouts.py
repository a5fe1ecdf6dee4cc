"""What a policy wrote for each token goes with the token into the row."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.data import MultiStep
from torchrl.envs import DTypeCastTransform, RewardClipping, RewardScaling, RewardSum, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Compose
from torchrl.modules.llm import TransformersWrapper

from tests.data.conftest import speak
from tests.transforms.test_wrapper import TEMPLATE, characters, model
from torchrl_lang.data import EpisodeRows, rows_from_chat, rows_from_rollout
from torchrl_lang.data.rollouts import row_of_step
from torchrl_lang.envs import TokenEnv, WordleEnv
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import from_row
from torchrl_lang.transforms import KLConstrainedTransform, LivingCost, RowReference, frozen_copy


def test_the_row_of_each_step():
    """Two episodes, the first of which has two steps and the last of which does not end; and one of a step."""
    take = torch.tensor([[False, True, True, False], [True, False, False, False]])
    assert row_of_step(take).tolist() == [[0, 0, 1, -1], [2, -1, -1, -1]]


def test_the_last_observation_of_an_episode_is_its_row(talk):
    """Unfinished ones are dropped or marked."""
    env = talk(seed=0, batch_size=[3], row_length=40)
    rollout = env.rollout(12, speak, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    ends = rollout["next"][rollout["next", "done"].squeeze(-1)]
    assert len(rows) == len(ends) > 3
    for key in (*ROW_KEYS, "terminated", "truncated"):
        assert torch.equal(rows[key], ends[key])
    assert all(from_row(row, env.tokenizer).terminated for row in rows)
    rollout = talk(seed=0, batch_size=[3], row_length=40, patience=1_000).rollout(2, speak)
    assert rows_from_rollout(rollout, unfinished="drop").shape == (0,)
    rows = rows_from_rollout(rollout, unfinished="truncate")
    assert rows["truncated"].flatten().tolist() == [True] * 3
    assert not rows["terminated"].any()
    assert torch.equal(rows["tokens"], rollout[:, -1]["next", "tokens"])


def test_episodes_without_their_first_turn_are_rows_where_nothing_of_it_is_needed(talk):
    def without_first_turn(env):
        return env.rollout(12, speak, break_when_any_done=False)[:, 1:]

    plain = without_first_turn(talk(seed=0, batch_size=[8], row_length=40))
    scaled = without_first_turn(TransformedEnv(talk(seed=0, batch_size=[8], row_length=40), RewardScaling(0.0, 10.0)))
    for rollout, options in ((plain, {}), (scaled, {"reward_key": None})):
        assert len(rows_from_rollout(rollout, unfinished="drop", **options)) > 8
    for rollout, options in ((plain, {"carry": ["figure"]}), (scaled, {})):
        with pytest.raises(ValueError, match=r"episodes began before this batch.*EpisodeRows"):
            rows_from_rollout(rollout, unfinished="drop", **options)


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


def batches(env, frames, batches_in_all, policy=speak, **options):
    total = frames * batches_in_all
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=total, **options)
    try:
        yield from collector
    finally:
        collector.shutdown()


def collected(env, policy, **options):
    return next(batches(env, 96, 1, policy, **options))


def sorted_rows(rows):
    """In an order of their own, so that two ways of collecting compare."""
    keys = [tuple(row["tokens"].tolist() + row["token_reward"].tolist()) for row in rows]
    return rows[torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))]


@pytest.mark.parametrize("turns", [1, 3])
def test_batches_of_any_length_give_the_same_episodes(talk, turns):
    """As many as end in one long rollout; figures stand where their tokens do, changed rewards of all turns too."""

    def env():
        return TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), RewardScaling(0.25, 2.0))

    rollout = env().rollout(12, speak, break_when_any_done=False)
    expected = rows_from_rollout(rollout, unfinished="drop", carry=["figure"])
    rows_of = EpisodeRows(carry=["figure"])
    got = torch.cat([rows_of(steps) for steps in batches(env(), 3 * turns, 12 // turns)])
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
    """Each token was said in the turn that began at or before it."""
    rows_of, place = EpisodeRows(carry={"when": "turn"}), torch.arange(40)
    for steps in batches(talk(seed=0, batch_size=[3], row_length=40), 3, 8):
        rows = rows_of(steps)
        agent = rows["agent_mask"]
        begins = agent & ~agent.roll(1, -1)
        assert (rows["when"] <= torch.where(agent, place, 0)).all()
        assert torch.equal(rows["when"][begins], place.expand_as(agent)[begins])


@pytest.mark.parametrize("unfinished", ["truncate", "drop"])
def test_collectors_that_begin_anew_with_each_batch(talk, unfinished):
    """Nothing waits; what is cut is a truncated row, or none."""
    env = talk(seed=0, batch_size=[16], row_length=60, patience=6)
    rows_of, place = EpisodeRows(carry=["figure"], unfinished=unfinished), torch.arange(60) + 0.5
    for steps in batches(env, 48, 10, reset_at_each_iter=True):
        rows = rows_of(steps)
        assert rows_of.waiting == 0
        done = steps["next", "done"].squeeze(-1)
        assert len(rows) == int(done.sum()) + (unfinished == "truncate") * int((~done[:, -1]).sum())
        assert int(rows["truncated"].sum()) == len(rows) - int(done.sum())
        assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], place, 0.0))


@pytest.mark.parametrize(("unfinished", "ended"), [("wait", True), ("truncate", False)])
def test_episodes_that_continue_after_their_end_are_refused(talk, unfinished, ended):
    """TorchRL marks the last step of a batch, without a reset; each of their turns would be in several rows."""
    rows_of = EpisodeRows(unfinished=unfinished)
    steps = batches(talk(seed=0, batch_size=[4]), 4, 2, set_truncated=ended)
    assert len(rows_of(next(steps))) == 4
    second = next(steps)
    with pytest.raises(ValueError, match=r"continue after the end .*set_truncated=True"):
        rows_of(second)
    rows_of.forget()
    rows_of(second)


@pytest.mark.parametrize("option", [{"compact_obs": True}, {"track_traj_ids": False}])
def test_the_option_that_leaves_out_what_rows_need_is_named(talk, option):
    steps = next(batches(talk(seed=0, batch_size=[4]), 4, 1, **option))
    with pytest.raises(KeyError, match="{}={}".format(*next(iter(option.items())))):
        EpisodeRows()(steps)


def test_waiting_for_what_does_not_come_is_noticed(talk, monkeypatch):
    monkeypatch.setattr("torchrl_lang.data.rollouts._MOST_BATCHES", 4)
    env = talk(seed=0, batch_size=[16], row_length=60, patience=6)
    with pytest.raises(RuntimeError, match=r"episodes of more than 4 batches wait.*unfinished='truncate'"):
        list(map(EpisodeRows(), batches(env, 16, 10, reset_at_each_iter=True)))


CONVERSIONS = {
    "rollout": lambda steps, **options: rows_from_rollout(steps, unfinished="drop", **options),
    "episodes": lambda steps, **options: EpisodeRows(**options)(steps),
}


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
    with pytest.raises(ValueError, match="is 0 for random actions"):
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
    "float64": lambda: Compose(
        DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"]), RewardScaling(0.0, 7.0)
    ),
    "several": lambda: Compose(LivingCost(0.25), RewardScaling(0.0, 2.0), RewardClipping(-1.0, 0.5), RewardSum()),
    "noise": Noise,
}


def episodes(rollout):
    """The steps of each finished episode, in the order in which rows come."""
    for steps in rollout.unbind(0):
        begin = 0
        for end in steps["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist():
            yield steps[begin : end + 1]
            begin = end + 1


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_turn_earns_what_its_step_did(name, talk):
    """Turns are windows of the row between the steps' lengths; only the last token of a turn is paid."""
    env = TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), TRANSFORMS[name]())
    rollout = env.rollout(12, speak, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    own = rows_from_rollout(rollout, unfinished="drop", reward_key=None)
    played = list(episodes(rollout))
    assert len(rows) == len(played) > 3
    for row, steps in zip(rows, played, strict=True):
        begins, ends = (td["attention_mask"].sum(-1).tolist() for td in (steps, steps["next"]))
        found = torch.stack([row["token_reward"][a:b].sum() for a, b in zip(begins, ends, strict=True)])
        torch.testing.assert_close(found, steps["next", "reward"].flatten().float())
    assert not torch.equal(rows["token_reward"], own["token_reward"])
    assert torch.equal(own["token_reward"], rollout["next", "token_reward"][rollout["next", "done"].squeeze(-1)])
    agent = rows["agent_mask"]
    last = agent & ~torch.cat([agent[:, 1:], torch.zeros_like(agent[:, :1])], 1)
    assert not rows["token_reward"][~last].any()


def test_what_is_not_changed_comes_back_bit_by_bit(talk):
    """RewardSum sums up beside the reward; turn rewards write the row themselves; TokenEnv pays single tokens."""
    games = [
        TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), RewardSum()),
        TransformedEnv(talk(seed=0, batch_size=[3], row_length=40), Compose(LivingCost(0.1), LivingCost(0.7))),
    ]
    for env in games:
        rollout = env.rollout(12, speak, break_when_any_done=False)
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


def hand_made(agent_mask, reward, *, lengths=(1, 3, 5), token_reward=(0.0,) * 5):
    """One episode whose turns end at these places of the row, and the rewards of its steps and tokens."""
    steps, width = len(reward), lengths[-1]
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    agent = torch.tensor(agent_mask, dtype=torch.bool) & real
    done = (torch.arange(steps) == steps - 1).view(1, steps, 1)
    step = TensorDict(tokens=torch.arange(width).expand(1, steps, width), attention_mask=real[None, 1:],
                      agent_mask=agent[None, 1:], token_reward=torch.tensor(token_reward).expand(1, steps, width),
                      reward=torch.tensor(reward).view(1, steps, 1), done=done, terminated=done)  # fmt: skip
    return TensorDict({"attention_mask": real[None, :-1], "next": step}, batch_size=[1, steps])


def test_rounding_of_turns_whose_tokens_are_paid_singly_changes_nothing():
    """0.1 + 0.2 is not 0.3 in float32 whatever the order: the row stays as it is; a real difference is added."""
    paid = [0.0, 0.1, 0.2, 0.7, 0.05, 0.0]
    for total, expected in ((1.05, 0.05), (1.05 + 1e-6, 0.05), (2.05, 1.05)):
        rollout = hand_made([0, 1, 1, 1, 1, 0], [total], lengths=(1, 6), token_reward=paid)
        row = rows_from_rollout(rollout, unfinished="drop")["token_reward"][0]
        assert row.tolist() == pytest.approx([*paid[:4], expected, 0.0], abs=1e-6)
        assert expected > 0.05 or torch.equal(row, torch.tensor(paid))


def test_a_turn_in_which_the_agent_writes_nothing():
    for agent, reward, expected in (([0, 1, 1, 0, 0], [1.0, 2.0], [0, 0, 3, 0, 0]),
                                    ([0, 0, 0, 1, 1], [0.0, 2.0], [0, 0, 0, 0, 2])):  # fmt: skip
        rows = rows_from_rollout(hand_made(agent, reward), unfinished="drop")
        assert rows["token_reward"].tolist() == [expected]
    with pytest.raises(ValueError, match=r"1 steps have another 'reward'.*no token of the agent.*reward_key=None"):
        rows_from_rollout(hand_made([0, 0, 0, 1, 1], [1.0, 2.0]), unfinished="drop")


def test_rewards_and_entries_that_cannot_be_used_are_named(talk):
    rollout = talk(seed=0, batch_size=[3], row_length=40).rollout(12, speak, break_when_any_done=False)
    rollout["next", "pair"] = torch.zeros(3, 12, 2)
    for options, error, message in (
        ({"carry": ["log_prob"]}, KeyError, "needs 'log_prob'"),
        ({"reward_key": "score"}, KeyError, r"needs \('next', 'score'\), found only.*reward_key="),
        ({"keep": ["score"]}, KeyError, r"needs \('next', 'score'\), found only.*Pass steps of"),
        ({"reward_key": "pair"}, ValueError, r"'pair' must be one number per step, \[3, 12, 1\], got \[3, 12, 2\]"),
        ({"unfinished": "ignore"}, ValueError, "unfinished must be one of"),
    ):
        with pytest.raises(error, match=message):
            rows_from_rollout(rollout, **{"unfinished": "drop", **options})
    rollout["next", "score"] = torch.full((3, 12, 1), 2.5)
    rows = rows_from_rollout(rollout, unfinished="drop", reward_key="score")
    steps = torch.tensor([len(steps) for steps in episodes(rollout)])
    torch.testing.assert_close(rows["token_reward"].sum(-1), 2.5 * steps)


def test_a_penalty_in_the_environment_reaches_the_rows_once():
    base = WordleEnv(["crane", "slate", "purge", "mouse"], batch_size=[6], seed=0)
    torch.manual_seed(0)
    actor = language_actor(causal_lm(vocab_size=35, layers=1, width=16, heads=2, max_length=96))
    policy = UtteranceActor(actor, base.tokenizer.control, 6, seed=0)
    frozen = frozen_copy(policy)
    with torch.no_grad():
        actor[1].module.weight.add_(0.1 * torch.randn_like(actor[1].module.weight))
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
    rows = torch.cat(found)
    assert len(rows) >= 15
    assert rows["terminated"].all()
    place = torch.arange(rows["tokens"].shape[-1]) + 0.5
    assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], place, 0.0))


def test_the_row_of_a_chat_holds_the_ids_that_the_policy_read_and_wrote():
    """A wrapper's log-probabilities lack those of first tokens, so they are left out."""
    template = TEMPLATE + "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
    kwargs = {"max_new_tokens": 5, "do_sample": True, "eos_token_id": 3, "bad_words_ids": [[0]]}
    options = {"tokenizer": characters(), "chat_template": template, "generate_kwargs": kwargs}
    options["return_log_probs"] = True
    env, lm = ChatEnv(batch_size=(2,), tokenizer=characters(), input_mode="history"), model()
    start = {"auto_reset": False, "tensordict": env.reset(TensorDict(query=["ab", "nab c"], batch_size=[2]))}
    steps = env.rollout(2, TransformersWrapper(lm, **options), **start)
    with pytest.raises(ValueError, match=r"A prompt does not begin with .* make a row of each step"):
        rows_from_chat(steps)  # the template writes a space between the characters
    rows = rows_from_chat(steps.unsqueeze(-1))
    assert rows["truncated"].all()
    assert "token_log_prob" not in rows
    scores = row_log_prob(language_actor(lm), rows)
    for row, score, step in zip(rows, scores, [x for line in steps.unbind(0) for x in line.unbind(0)], strict=True):
        ids, written = (step["tokens", key] for key in ("prompt", "response")), step["log_probs", "response"]
        assert torch.equal(row["tokens"][row["attention_mask"]], torch.cat([*ids]))
        torch.testing.assert_close(score[row["agent_mask"]][1:], written[1:], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="build the wrapper with pad_output=False"):
        rows_from_chat(env.rollout(1, TransformersWrapper(lm, **options, pad_output=True), **start))


def test_the_turns_of_a_chat_are_one_row():
    parts = []
    for prompt, response, reward in (([5, 6], [7], 1.0), ([5, 6, 7, 8], [3, 4], 2.0), ([9], [6], 4.0)):
        end = {"reward": [reward], "done": [prompt != [5, 6]], "terminated": [prompt == [9]]}
        log_probs = {"response": [x - 9.0 for x in response]}
        parts.append(TensorDict(tokens={"prompt": prompt, "response": response}, log_probs=log_probs, next=end))
    rows = rows_from_chat(lazy_stack([lazy_stack(parts)]))
    assert rows["tokens"].tolist() == [[5, 6, 7, 8, 3, 4], [9, 6, 0, 0, 0, 0]]
    assert rows["attention_mask"].sum(-1).tolist() == [6, 2]
    assert rows["agent_mask"].int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0]]
    assert rows["token_reward"].tolist() == [[0, 0, 1, 0, 0, 2], [0, 4, 0, 0, 0, 0]]
    assert rows["token_log_prob"].tolist() == [[0, 0, -2, 0, -6, -5], [0, -3, 0, 0, 0, 0]]
    assert rows["terminated"].tolist() == (~rows["truncated"]).tolist() == [[False], [True]]
    with pytest.raises(KeyError, match="steps of a ChatEnv whose policy wrote tokens"):
        rows_from_chat(lazy_stack([parts[2].exclude("tokens")]))
    with pytest.raises(ValueError, match="of 1 tokens has 2 rewards"):
        rows_from_chat(lazy_stack([parts[2].set(("next", "reward"), torch.zeros(2))]))
