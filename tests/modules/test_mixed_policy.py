"""Turns that somebody else plays: in the transcript, in the return, and in no loss."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lang import modules
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.functional.decisions import trained_states
from torchrl_lang.objectives import BCLoss, ILQLLoss, PPOLoss

WORDS = ["crane", "slate", "purge", "mouse"]


def env(n=6):
    return WordleEnv(WORDS, batch_size=[n], max_tries=3, seed=0)


@pytest.fixture(scope="module")
def actor():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return modules.language_actor(
            modules.causal_lm(vocab_size=35, layers=1, width=16, heads=2, max_length=64, initializer_range=0.2)
        )


def speaker(actor, **options):
    return modules.UtteranceActor(actor, env(1).tokenizer.control, 6, seed=0, **options)


def mixed(actor, prob=0.5, seed=1, **options):
    return modules.MixedPolicy(speaker(actor, **options), RandomWordPlayer(WORDS, seed=2), prob, seed=seed)


@pytest.fixture(scope="module")
def rows(actor):
    """Games in which about half of the turns are examples."""
    steps = env(12).rollout(3, mixed(actor), break_when_any_done=False)
    assert 0.2 < steps["is_example"].float().mean() < 0.8
    return rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob", "train_mask"])


def test_always_an_example_is_the_example(actor):
    players = mixed(actor, 1.0, diagnostics=True), RandomWordPlayer(WORDS, seed=2)
    found, expected = (env().rollout(3, player, break_when_any_done=False) for player in players)
    assert torch.equal(found["next", "tokens"], expected["next", "tokens"])
    assert found["is_example"].all()
    for key in ("train_mask", "token_log_prob", "behavior_log_prob", "token_entropy", "action_log_prob"):
        assert not found[key].any()


def test_every_row_is_drawn_for_itself_and_the_others_say_what_they_would():
    def say(n, width):
        return TensorDictModule(lambda tokens: torch.full_like(tokens[..., :width], n), ["tokens"], ["action"])

    td = TensorDict(tokens=torch.zeros(2000, 2, 8, dtype=torch.int64), batch_size=[2000, 2])
    said = modules.MixedPolicy(say(1, 3), say(2, 3), 0.25, seed=0)(td)
    assert said["is_example"].shape == (2000, 2, 1)
    assert said["is_example"].float().mean().item() == pytest.approx(0.25, abs=0.035)  # five standard deviations
    assert torch.equal(said["action"] == 2, said["is_example"].expand(2000, 2, 3))
    again = modules.MixedPolicy(say(1, 3), say(2, 3), 0.25, seed=0)(td.select("tokens"))
    assert torch.equal(again["is_example"], said["is_example"])
    with pytest.raises(ValueError, match="use the same action_length"):  # one token would be repeated
        modules.MixedPolicy(say(1, 3), say(2, 1), 0.25, seed=0)(td)


def test_rows_without_an_example_say_what_they_would_say(actor):
    td = env(40).reset()
    alone, together = speaker(actor)(td.clone()), mixed(actor)(td.clone())
    example = together["is_example"].squeeze(-1)
    assert 0 < example.sum() < 40
    for key in ("action", "token_log_prob", "action_log_prob"):
        torch.testing.assert_close(together[key][~example], alone[key][~example])
    assert together["done"].equal(td["done"])  # the policy was told otherwise, nobody else
    td["done"][1] = True
    always = mixed(actor, 1.0)
    assert torch.equal(always(td.clone())["is_example"], ~td["done"])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert not always(td)["is_example"].any()


def make(name, actor, **options):
    actor, v = copy.deepcopy(actor), modules.value_module(modules.ValueHead(16))
    if name == "bc":
        return BCLoss(actor, actor_normalizer="action", **options)
    if name == "ilql":
        return ILQLLoss(actor, modules.qvalue_module(modules.QValueHead(16, 35)), v, **options)
    return PPOLoss(speaker(actor), v, entropy_weight=0.01, **options)


def gradients(loss, rows):
    loss.zero_grad(set_to_none=True)
    sum(value.sum() for key, value in loss(rows).items() if key.startswith("loss_")).backward()
    return {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["bc", "ilql", "ppo"])
def test_examples_are_in_no_loss_and_no_gradient(name, actor, rows):
    torch.manual_seed(3)
    loss = make(name, actor, reduction="sum")
    if name == "ppo":
        rows = loss.estimate(rows.clone())
        loss.normalize_advantage = False
    found = gradients(loss, rows)
    # What was said of an example by whomever, and what it was worth, is not looked at.
    example = rows["agent_mask"] & ~rows["train_mask"]
    other = rows.clone()
    for key in ("token_log_prob", "advantage", "value_target"):
        if key in other.keys():
            other[key] = torch.where(example, 17.0, other[key])
    for key, gradient in gradients(loss, other).items():
        assert torch.equal(gradient, found[key]), key
    # Position by position it is the loss without a mask, at the decisions that are learned.
    torch.manual_seed(3)
    each = make(name, actor, reduction="none")
    each.normalize_advantage = False
    left, whole = each(rows), each(rows.exclude("train_mask"))
    mask = trained_states(rows["train_mask"], rows["agent_mask"])
    for key, value in left.items():
        if key.startswith("loss_") and value.ndim == 2:
            expected = torch.where(mask, whole[key], 0.0)
            torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-5)


def test_advantages_go_through_examples(actor):
    """What the examples earned later belongs to the return of what the policy said first."""
    policy = mixed(actor, 0.5, seed=4)
    steps = env(20).rollout(3, policy, break_when_any_done=False)
    rows = rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob", "train_mask"])
    value = modules.value_module(modules.ValueHead(16))
    rows = PPOLoss(policy.policy, value, gamma=1.0, lmbda=1.0, turn_gamma=1.0, turn_lmbda=1.0).estimate(rows)
    ended = rows["terminated"].squeeze(-1)
    first = rows["agent_mask"].int().argmax(-1, keepdim=True)
    ours = rows["train_mask"].gather(-1, first).squeeze(-1)
    behind = (rows["agent_mask"] & ~rows["train_mask"]).any(-1)
    checked = ended & ours & behind
    assert checked.any()
    target = rows["value_target"].gather(-1, first).squeeze(-1)
    torch.testing.assert_close(target[checked], rows["token_reward"].sum(-1)[checked], atol=1e-5, rtol=1e-5)


def test_a_recurrent_policys_memory_is_its_own(actor):
    """What it reads again is left as it wrote it; values, wherever they stand, are not made up."""

    class Recurrent(TensorDictModuleBase):
        in_keys, out_keys = ("tokens", "h"), ("action", ("next", "h"), ("a", "state_value"))

        def forward(self, td):
            n = td["tokens"].shape[0]
            td.set(("next", "h"), td["h"] + 1).set(("a", "state_value"), torch.ones(n, 2))
            return td.set("action", torch.zeros(n, 2, dtype=torch.int64))

    example = TensorDictModule(lambda tokens: torch.ones(len(tokens), 2, dtype=torch.int64), ["tokens"], ["action"])
    rows = TensorDict(tokens=torch.zeros(16, 4, dtype=torch.int64), h=torch.full((16, 1), 5.0), batch_size=[16])
    said = modules.MixedPolicy(Recurrent(), example, 0.5, seed=0)(rows)
    chosen = said["is_example"].squeeze(-1)
    assert chosen.any()
    assert not chosen.all()
    assert (said["next", "h"] == 6).all()
    assert torch.equal(said["a", "state_value"].isnan().all(-1), chosen)
