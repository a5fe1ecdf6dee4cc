"""States below the first trained layer, which rows carry: read by all that share these layers, and by nobody else.

They come from a pass over the rows or from the actor that played them.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch

from tests.modules.toys import CONTROL, KINDS, TOKENIZER, rows, sliding_lm, tiny_lm, use_exact_norms
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TextGameEnv
from torchrl_lang.functional.decisions import until_last_decision
from torchrl_lang.modules import (
    Trunk,
    UtteranceActor,
    causal_lm,
    language_actor,
    row_log_prob,
    train_top_layers,
    with_frozen_states,
)
from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
from torchrl_lang.modules.frozen.lower_layers import StatesOfRows, transformer_blocks
from torchrl_lang.modules.privileged_trunk import PrivilegedTrunk
from torchrl_lang.objectives import BCLoss
from torchrl_lang.schema import FROZEN_STATES, PRIVILEGED


def make_rows(**shape):
    batch = rows(**shape)
    batch["agent_mask"] = batch["attention_mask"] & (torch.arange(batch["tokens"].shape[-1]) > 1)
    return batch


def calls(model):
    """One entry for each pass of the lowest block from now on."""
    found = []
    transformer_blocks(model)[0].register_forward_pre_hook(lambda block, inputs: found.append(1))
    return found


def loss_and_gradients(loss, batch):
    terms = loss(batch)
    sum(terms[key] for key in terms.keys() if key.startswith("loss_")).backward()
    found = [terms["loss_actor"].detach(), *(p.grad.clone() for p in loss.parameters() if p.grad is not None)]
    loss.zero_grad()
    return found


@pytest.mark.parametrize("kind", [*KINDS, "olmo3"])
def test_losses_references_and_gradients_are_those_without(kind, monkeypatch):
    use_exact_norms(monkeypatch)
    lm = sliding_lm(kind) if kind == "olmo3" else tiny_lm(kind).double()
    actor = language_actor(lm)
    train_top_layers(actor, 1)
    policy = UtteranceActor(actor, CONTROL, 30)
    loss = BCLoss(policy, transition_weight=0.5, kl_weight=0.3, reference=frozen_copy(policy))
    with torch.no_grad():  # the policy is no longer its reference
        next(transformer_blocks(lm)[1].parameters()).mul_(2)
    batch = make_rows()
    plain, log_prob = loss_and_gradients(loss, batch[::2]), row_log_prob(policy, batch)
    carrying = with_frozen_states(policy, batch)
    passes = [*map(calls, (lm, loss.reference.actor))]
    for found, expected in zip(loss_and_gradients(loss, carrying[::2].clone()), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        row_log_prob(policy, carrying.reshape(7, 1)).squeeze(1), log_prob, rtol=1e-10, atol=1e-10
    )
    assert passes == [[], []]


def test_states_of_other_weights_or_other_tokens_are_not_read():
    batch, actor = make_rows(), language_actor(tiny_lm("llama", layers=3))
    assert FROZEN_STATES not in with_frozen_states(actor, batch).keys()
    train_top_layers(actor, 2)
    lm, trunk = actor[0].module.model, actor[0]
    carrying = with_frozen_states(actor, batch)
    read = calls(lm)

    def reads_tokens(trunk, tensordict, read=read):
        before = len(read)
        trunk(tensordict.copy())
        return len(read) > before

    assert not reads_tokens(trunk, carrying)
    assert not reads_tokens(trunk, carrying[2:4,].copy())
    edited = carrying.clone()
    edited["tokens"][edited["attention_mask"]] = 3
    assert reads_tokens(trunk, edited)
    assert reads_tokens(trunk, carrying.clone().set("tokens", batch["tokens"].roll(1, 0)))
    critic = PrivilegedTrunk(trunk.module)
    assert reads_tokens(critic, carrying.copy().set(PRIVILEGED, torch.ones(7, 2, dtype=torch.int64)))
    other = copy.deepcopy(trunk)
    assert reads_tokens(other, carrying, calls(other.module.model))
    transformer_blocks(lm)[0].requires_grad_(True)
    assert reads_tokens(trunk, carrying)
    transformer_blocks(lm)[0].requires_grad_(False)
    assert not reads_tokens(trunk, carrying)
    longer = carrying.copy().set("attention_mask", torch.ones_like(batch["attention_mask"]))
    assert reads_tokens(trunk, longer)  # what was padding is real now
    zeros = carrying.copy().set(FROZEN_STATES, carrying[FROZEN_STATES].apply(torch.zeros_like))
    assert reads_tokens(trunk, zeros)  # as a storage fills rows that had no states
    two = carrying[FROZEN_STATES].copy().set("1_other", next(iter(carrying[FROZEN_STATES].values())))
    assert reads_tokens(trunk, carrying.copy().set(FROZEN_STATES, two))
    lm.bfloat16().float()  # rounded weights, in other memory
    assert reads_tokens(trunk, carrying)
    carrying = with_frozen_states(actor, batch)
    assert not reads_tokens(trunk, carrying)
    with torch.no_grad():
        lm.embed_tokens.weight.mul_(2)
    assert reads_tokens(trunk, carrying)
    with torch.autocast("cpu", torch.bfloat16):
        assert reads_tokens(trunk, with_frozen_states(actor, batch)) is False
    assert reads_tokens(trunk, carrying)


def test_a_model_that_adds_positions_in_a_way_of_its_own_is_left_as_it_is():
    lm = causal_lm("opt", vocab_size=9, layers=2, width=8, heads=2, max_length=20, pad=CONTROL.pad)
    actor = language_actor(lm)
    train_top_layers(actor, 1)
    assert FROZEN_STATES not in with_frozen_states(actor, make_rows()).keys()


def test_a_frozen_trunk_shares_what_rows_begin_with(monkeypatch):
    monkeypatch.setitem(importlib.import_module("torchrl_lang.modules.row_groups")._CALL, "cpu", 2)
    batch = make_rows()
    batch["tokens"][:, :8] = batch["tokens"][0, :8]
    actor = language_actor(tiny_lm("llama"))
    train_top_layers(actor, 0)
    mask, plain = batch["attention_mask"], actor[0](batch.copy())["hidden"]
    torch.testing.assert_close(actor[0](with_frozen_states(actor, batch))["hidden"][mask], plain[mask])


def test_rows_that_cannot_carry_states():
    batch, actor = make_rows(), language_actor(tiny_lm("llama"))
    train_top_layers(actor, 1)
    assert FROZEN_STATES not in with_frozen_states(actor, batch[:0]).keys()
    with torch.inference_mode():  # weights without a version
        other = language_actor(tiny_lm("llama"))
        train_top_layers(other, 1)
    assert FROZEN_STATES not in with_frozen_states(other, batch).keys()
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["embed_tokens"])
    adapted = language_actor(peft.get_peft_model(tiny_lm("llama"), lora).requires_grad_(False))
    assert adapted[0].module.frozen_layers == 0


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_blocks_compute_in_half_precision_below_blocks_in_float32(kind):
    """States are those of the blocks in bfloat16 up to its rounding, and the same for all that share them."""
    lm = tiny_lm(kind, layers=3)
    actor, batch = language_actor(lm), make_rows()
    policy = UtteranceActor(actor, CONTROL, 30, prefix_cache=True)
    exact = row_log_prob(policy, batch)
    before = train_top_layers(actor, 1)
    assert train_top_layers(actor, 1, dtype=torch.bfloat16) == before
    hooks = [len(block._forward_pre_hooks) for block in transformer_blocks(lm)]
    train_top_layers(actor, 1, dtype=torch.bfloat16)
    assert [len(block._forward_pre_hooks) for block in transformer_blocks(lm)] == hooks == [1, 1, 1]
    lower, _, upper = ({p.dtype for p in block.parameters()} for block in transformer_blocks(lm))
    assert (lower, upper) == ({torch.bfloat16}, {torch.float32})
    reference, carrying = frozen_copy(policy), with_frozen_states(policy, batch)
    assert torch.bfloat16 in {entry.dtype for entry in carrying[FROZEN_STATES].values(True, True)}
    for scored in (row_log_prob(policy, batch), row_log_prob(reference.actor, batch), row_log_prob(policy, carrying)):
        torch.testing.assert_close(scored, exact, rtol=0, atol=0.05)
        assert scored.dtype == torch.float32
    loss = BCLoss(policy, transition_weight=0.5)
    terms = [loss_and_gradients(loss, each) for each in (batch, carrying)]
    for one, other in zip(*terms, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)
    played = policy(rows())
    assert played["token_log_prob"].isfinite().all()


def trained_on_top(lm, layers=1):
    actor = language_actor(copy.deepcopy(lm))
    train_top_layers(actor, layers)
    return actor


@pytest.fixture
def lm():
    return tiny_lm("llama", layers=3)


@pytest.fixture
def handed(lm):
    """Those of a model, for ``make_rows()``."""
    states = StatesOfRows()
    assert FROZEN_STATES in states.carrying(trained_on_top(lm), make_rows()).keys()
    return states


def test_states_are_read_by_a_model_with_other_upper_layers(lm, handed):
    with torch.no_grad():
        next(transformer_blocks(lm)[2].parameters()).mul_(2)
    other, batch = trained_on_top(lm), make_rows()
    carrying = handed.carrying(other, batch)
    plain = other(batch.copy())["logits"]
    read = calls(other[0].module.model)
    torch.testing.assert_close(other(carrying)["logits"], plain)
    assert read == []


def test_only_one_row_is_computed_again(lm, handed, monkeypatch):
    actor, computed = trained_on_top(lm), []
    kind = type(actor[0].module)
    real = kind.frozen_states
    monkeypatch.setattr(kind, "frozen_states", lambda trunk, *rows: computed.append(len(rows[0])) or real(trunk, *rows))
    handed.carrying(actor, make_rows())
    assert computed == [1]


@pytest.mark.parametrize("change", ["weight", "layers", "dtype", "config", "autocast", "tokens", "mask", "fewer"])
def test_others_are_computed(lm, handed, change):
    actor, batch = trained_on_top(lm, 2 if change == "layers" else 1), make_rows()
    model = actor[0].module.model
    if change == "weight":
        with torch.no_grad():
            model.embed_tokens.weight[3, 5] += 1e-3
    if change == "dtype":
        model.double()
    if change == "config":
        transformer_blocks(model)[0].input_layernorm.variance_epsilon = 10.0
    if change == "tokens":
        batch["tokens"][4, 1] = 2 if batch["tokens"][4, 1] != 2 else 3
    if change == "mask":
        batch["attention_mask"][0] = True
    if change == "fewer":
        batch = batch[:-1]
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        found = handed.carrying(actor, batch)
        expected = StatesOfRows().carrying(actor, batch)
    assert found[FROZEN_STATES].keys() == expected[FROZEN_STATES].keys()
    for one, other in zip(found[FROZEN_STATES].values(), expected[FROZEN_STATES].values(), strict=True):
        real = batch["attention_mask"][:, : one["states"].shape[1]]
        assert torch.equal(one["states"][real], other["states"][real])


def player(kind="llama", *, lora=False, seed=0):
    """A policy in double precision, two of whose three layers are frozen."""
    lm = tiny_lm(kind, layers=3, max_length=60, seed=seed).double()
    if lora:
        peft = pytest.importorskip("peft")
        targets = {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": "layers"}
        lm = peft.get_peft_model(lm, peft.LoraConfig(r=2, **targets)).double()
    actor = language_actor(lm)
    if not lora:
        train_top_layers(actor, 1)
    return UtteranceActor(actor, CONTROL, 9, seed=seed)


class LetterGame:
    """An ``a`` ends it. The text depends on the seed, and every second game begins as the one before."""

    def reset(self, seed):
        return "bcd"[seed // 2 % 3] * (1 + seed // 2 % 2)

    def step(self, text):
        return "f" * (1 + len(text) % 3), 0.0, "a" in text


def games_of(policy, batch=6):
    """Rows of games that end and begin again in their batch; after three turns they do not, but are truncated."""
    options = {"row_length": 50, "action_length": 9, "max_turns": 3, "batch_size": [batch], "seed": 1}
    env = TextGameEnv(LetterGame, TOKENIZER, **options)
    return rows_from_rollout(env.rollout(13, policy, break_when_any_done=False), unfinished="drop")


def fill_their_slots(games):
    """Bool ``[N]``: the last utterance has all nine tokens, and acting does not compute the state of the eighth."""
    agent = games["agent_mask"]
    begin = (agent & ~agent.roll(1, -1)) * torch.arange(agent.shape[-1])
    return agent.cumsum(-1)[:, -1] - agent.cumsum(-1).gather(1, begin.amax(-1, keepdim=True))[:, 0] == 8


@pytest.mark.parametrize("lora", [False, True])
def test_states_that_the_actor_computed_are_not_computed_again(lora, monkeypatch):
    use_exact_norms(monkeypatch)
    policy, computed = player(lora=lora), []
    with policy.keeping_states():
        games = games_of(policy)
    ended = games["terminated"].squeeze(-1)
    again = ~ended | fill_their_slots(games)
    assert 6 < ended.sum() < len(games) - 3
    assert (ended & again).any()
    plain, frozen_states = with_frozen_states(player(lora=lora), games), Trunk.frozen_states
    monkeypatch.setattr(
        Trunk, "frozen_states", lambda trunk, *rows: computed.append(rows[0]) or frozen_states(trunk, *rows)
    )
    carrying = with_frozen_states(policy, games, decisions_only=True)
    assert len(computed.pop(0)) == 1  # whether the model can be divided
    assert sum(map(len, computed)) == again.sum()
    read = until_last_decision(games["attention_mask"], games["agent_mask"], ended)
    (entries,), (expected,) = carrying[FROZEN_STATES].values(), plain[FROZEN_STATES].values()
    width = entries["states"].shape[1]
    torch.testing.assert_close(entries["states"][read[:, :width]], expected["states"][:, :width][read[:, :width]])
    assert torch.equal(entries["tokens"], ((games["tokens"] + 1) * read)[:, :width])
    passes = calls(policy.decoder.actor[0].module.model)
    found = row_log_prob(policy, carrying)
    assert not passes
    torch.testing.assert_close(found, row_log_prob(policy, games))


@pytest.mark.parametrize("why", ["outside", "forgotten", "other weights", "gpt2", "no cache", "whole rows", "a block"])
def test_states_that_were_not_kept_are_computed(why):
    policy = player("gpt2" if why == "gpt2" else "llama")
    if why == "no cache":
        policy = UtteranceActor(policy.decoder.actor, policy.decoder.control, 9, prefix_cache=False)
    with policy.keeping_states():
        games = games_of(policy)
    if why == "outside":
        games = games_of(policy)
    elif why == "forgotten":
        policy.forget()
    elif why == "other weights":
        with torch.no_grad():
            next(policy.decoder.actor.parameters()).mul_(2)
    elif why == "a block":  # the states of an earlier one are freed
        with policy.keeping_states():
            pass
    served = known(policy, games, decisions_only=why != "whole rows")
    assert served < (5 if why == "outside" else 1)  # a short game may be played twice
    found = with_frozen_states(policy, games, decisions_only=why != "whole rows")
    (entries,), (expected,) = (
        one[FROZEN_STATES].values() for one in (found, with_frozen_states(policy.decoder.actor, games))
    )
    read = entries["tokens"] > 0
    torch.testing.assert_close(entries["states"][read], expected["states"][:, : read.shape[1]][read])
    assert (policy.kept_states() is None) == (why in ("forgotten", "gpt2", "no cache", "a block"))


def known(policy, games, **options):
    """The number of rows whose states are not computed again."""
    with pytest.MonkeyPatch.context() as patched:
        computed, frozen_states = [], Trunk.frozen_states
        patched.setattr(Trunk, "frozen_states", lambda *rows: computed.extend(rows[1]) or frozen_states(*rows))
        with_frozen_states(policy, games[:1], **options)  # tries whether the model can be divided
        computed.clear()
        with_frozen_states(policy, games, **options)
    return len(games) - len(computed)


def test_what_is_kept_does_not_depend_on_other_calls():
    policy = player()
    games_of(policy)  # without a block, as a collector's first call
    with policy.keeping_states():
        with policy.keeping_states():
            one = games_of(policy)
        two = games_of(policy, batch=2)
    for _ in range(2):
        games_of(policy, batch=2)
    served = [known(policy, games, decisions_only=True) for games in (one, two)]
    assert served == [int((games["terminated"].squeeze(-1) & ~fill_their_slots(games)).sum()) for games in (one, two)]
    assert min(served) > 2


def test_upper_layers_may_change_between_acting_and_training():
    policy = player()
    with policy.keeping_states():
        games = games_of(policy)
    with torch.no_grad():
        next(transformer_blocks(policy.decoder.actor)[2].parameters()).mul_(2)
    carrying, passes = with_frozen_states(policy, games, decisions_only=True), calls(policy)
    found = row_log_prob(policy, carrying)
    assert not passes
    torch.testing.assert_close(found, row_log_prob(policy, games))
