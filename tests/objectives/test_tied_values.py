"""ILQL with values tied to the language model's embedding: one embedding, read by actor, values and their targets."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torchrl.objectives import HardUpdate, SoftUpdate

from tests.objectives.conftest import (
    VOCAB,
    WIDTH,
    losses_of,
    make_actor,
    make_heads,
    make_tied,
    total,
)
from torchrl_lang.modules import (
    TiedQValueHead,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import ILQLLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def make_detached(**options):
    actor, (_, value) = make_actor(), make_heads()
    torch.manual_seed(2)
    return ILQLLoss(actor, qvalue_module(TiedQValueHead(WIDTH, actor[1].module)), value, **options)


def embedding_of(loss):
    return loss.actor_network[1].module


@pytest.mark.parametrize("updater", [lambda loss: SoftUpdate(loss, tau=0.5), HardUpdate])
def test_targets_hold_no_embedding_and_read_the_present_one(updater, rows):
    loss = make_tied()
    follow = updater(loss)
    for params in (loss.qvalue_network_params, loss.target_qvalue_network_params):
        assert all(VOCAB not in value.shape for value in params.values(True, True))
    before = loss(rows)["target_qvalue"]
    with torch.no_grad():
        embedding_of(loss).weight.mul_(2)
    assert not torch.isclose(loss(rows)["target_qvalue"], before)
    follow.step()
    assert total(loss(rows)).isfinite()


def test_the_state_holds_the_embedding_once_and_comes_back(rows):
    loss, other = make_tied(), make_tied()
    total(loss(rows)).backward()
    torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=0.5).step()
    state = loss.state_dict()
    assert all("actor_network" in name for name, value in state.items() if VOCAB in value.shape)
    other.load_state_dict(state)
    for name, value in losses_of(loss(rows)).items():
        torch.testing.assert_close(other(rows)[name], value)


@pytest.mark.parametrize(
    "options", [{}, {"margin_weight": 0.3, "cql_temperature": 0.7}, {"reduction": "none"}], ids=str
)
def test_pieces_equal_the_plain_form_and_gradients_reach_the_embedding(options, rows):
    rows["token_reward"] = rows["token_reward"].double()
    found = []
    for chunk in (None, 4):
        loss = make_tied(logits_chunk=chunk, **options).double()
        sum(value.sum() for value in losses_of(loss(rows)).values()).backward()
        found.append({name: p.grad for name, p in loss.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-10)


def test_by_default_the_language_models_loss_alone_trains_the_embedding(rows):
    """With the trunk's share through its input left out, nothing of the values arrives."""
    loss = make_detached(actor_weight=0.0, detach_qvalue=True, detach_value=True)
    total(loss(rows)).backward()
    assert embedding_of(loss).weight.grad is None
    assert all(p.grad is not None for p in loss.qvalue_network_params.parameters())


def test_a_copied_loss_is_tied_to_its_own_actor(rows):
    loss = make_tied()
    copied = deepcopy(loss)
    assert copied.qvalue_network.module.embedding is embedding_of(copied)
    assert copied.qvalue_network.module.embedding is not embedding_of(loss)
    total(copied(rows)).backward()
    assert embedding_of(loss).weight.grad is None


def test_an_embedding_that_nothing_trains_is_refused():
    lm, value_lm = (causal_lm("llama", vocab_size=12, layers=1, width=16, heads=2, max_length=32) for _ in range(2))
    trunk = language_actor(value_lm)[0]
    for embedding, detached in ((value_lm.lm_head, True), (value_lm.get_input_embeddings(), False)):
        head = TiedQValueHead(16, embedding, detach_embedding=detached)
        ILQLLoss(language_actor(lm), qvalue_module(head), value_module(ValueHead(16)), value_trunk=trunk)
    lost = TiedQValueHead(16, value_lm.lm_head, detach_embedding=False)
    with pytest.raises(ValueError, match="no optimiser would find it"):
        ILQLLoss(language_actor(lm), qvalue_module(lost), value_module(ValueHead(16)), value_trunk=trunk)


def test_an_embedding_outside_of_the_loss_is_fingerprinted(rows):
    """The values read a model that is neither the policy nor a trunk of the loss."""

    def make(seed, **options):
        actor, (_, value) = make_actor(), make_heads()
        torch.manual_seed(2)
        head = TiedQValueHead(WIDTH, make_actor(seed)[1].module, **options)
        return ILQLLoss(actor, qvalue_module(head), value)

    loss = make(6)
    state = loss.state_dict()
    assert "tied_embedding_fingerprint" in state
    make(6).load_state_dict(state)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="another language model than that whose embedding the Q head"):
            make(7).load_state_dict(state, strict=strict)
    del state["tied_embedding_fingerprint"]
    with pytest.raises(RuntimeError, match=r"Missing key.*tied_embedding_fingerprint"):
        loss.load_state_dict(state)
    assert loss.load_state_dict(state, strict=False).missing_keys == ["tied_embedding_fingerprint"]
    for inside in (make_tied(), make_detached()):
        assert not any("fingerprint" in name for name in inside.state_dict())
