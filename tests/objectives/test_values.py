"""Action values of a batch: terms over the vocabulary in pieces, and values tied to the model's embedding."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import HardUpdate, SoftUpdate

from tests.objectives.models import VOCAB, WIDTH, losses_of, make_actor, make_ilql, make_tied, total
from tests.objectives.test_contract import assert_same
from torchrl_lang import modules
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import BCLoss, ILQLLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

OPTIONS = [
    {},
    {"margin_weight": 0.4, "margin": 0.2, "cql_temperature": 0.6},
    {"cql_weight": 0.0, "margin_weight": 1.0, "kind": "deep"},
    {"detach_qvalue": True, "detach_actor": True, "margin_weight": 0.4},
    {"advantage_temperature": 0.8, "transition_weight": 0.3, "actor_normalizer": "action"},
    {"qvalue_weight": 0.0, "value_weight": 0.0, "actor_weight": 0.0},
]
CASES = [*((make_ilql, options) for options in OPTIONS), (make_tied, {"margin_weight": 0.3, "cql_temperature": 0.7})]


@pytest.mark.filterwarnings("error")
def test_a_policy_may_be_built_from_the_target_before_its_updater():
    assert make_ilql().target_qvalue_network().module is not None


def outcome(loss, rows):
    """Losses and gradients; where there is one a position, each with a weight of its own."""
    loss.zero_grad()
    out = losses_of(loss(rows))
    g = torch.Generator().manual_seed(0)
    sum((value * torch.rand(value.shape, generator=g)).sum() for value in out.values()).backward()
    gradients = {name: p.grad for name, p in loss.named_parameters() if p.grad is not None}
    return {key: value.detach() for key, value in out.items()}, gradients


def assert_equal_outcome(loss, other, rows):
    rows = rows.clone().set("token_reward", rows["token_reward"].double())
    for left, right in zip(outcome(loss.double(), rows), outcome(other.double(), rows), strict=True):
        assert_same(left, right, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("reduction", "masked"), [("mean", True), ("sum", False), ("none", True)])
@pytest.mark.parametrize(("make", "options"), CASES)
def test_ilql_equals_the_plain_form(make, options, reduction, masked, rows):
    if masked:
        rows["collector", "mask"] = torch.arange(6) % 3 > 0
    plain, pieces = (make(reduction=reduction, logits_chunk=chunk, **options) for chunk in (None, 4))
    assert_equal_outcome(pieces, plain, rows)


def test_a_masked_row_may_hold_anything(rows):
    """Even states that are no numbers: its decisions are left out, not multiplied by zero."""
    loss = make_ilql(logits_chunk=4, detach_value=True, value_weight=0.0, qvalue_weight=0.0)
    kept = torch.tensor([True, True, False, True, True, True])
    rows["collector", "mask"] = kept
    spoil = torch.where(kept, 1.0, torch.nan)[:, None, None]
    handle = loss.actor_network[0].module.register_forward_hook(lambda module, args, hidden: hidden * spoil)
    out = loss(rows)
    handle.remove()
    expected = loss(rows)
    for name in ("loss_cql", "loss_actor"):
        torch.testing.assert_close(out[name], expected[name])
    gradients = torch.autograd.grad(out["loss_cql"], loss.qvalue_network_params.parameters())
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_without_the_table_the_head_never_runs_over_the_vocabulary(rows):
    loss = make_ilql(margin_weight=0.1, logits_chunk=4)
    head, layer = loss.qvalue_network.module, loss.actor_network[1].module
    head.forward = layer.forward = None  # calling either would fail
    assert all(value.isfinite() for value in losses_of(loss(rows)).values())


def test_by_default_a_large_vocabulary_goes_in_chunks_and_equals_the_plain_form(rows, monkeypatch):
    """Small batches in one piece; the taken action's rows of the last layer meet the pieces' gradient in one sum."""
    losses = []
    for chunk in ("auto", None):
        torch.manual_seed(0)
        actor = language_actor(causal_lm("gpt2", vocab_size=600, layers=1, width=WIDTH, heads=2, max_length=32))
        q = QValueHead(WIDTH, 600)
        nn.init.normal_(q.out_weight, std=0.3)
        losses.append(ILQLLoss(actor, qvalue_module(q), value_module(ValueHead(WIDTH)), logits_chunk=chunk))
    in_chunks, cql_term = [], QValueHead.cql_term
    monkeypatch.setattr(QValueHead, "cql_term", lambda *args, **kw: in_chunks.append(1) or cql_term(*args, **kw))
    losses[0](rows)
    assert in_chunks == [1]
    losses[1](rows)
    assert in_chunks == [1]
    assert_equal_outcome(*losses, rows)


class Doubled(nn.Linear):
    """A linear layer with something behind it: not to be taken for its weight alone."""

    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_heads_with_more_to_them_are_run_whole(rows):
    torch.manual_seed(0)
    hooked = nn.Linear(WIDTH, VOCAB)
    hooked.register_forward_hook(lambda module, args, out: out + module.weight.sum(-1))
    for head in (Doubled(WIDTH, VOCAB), nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Tanh()), hooked):
        layer, (trunk, _, output) = TensorDictModule(head, in_keys=["hidden"], out_keys=["logits"]), make_actor()
        actor = ProbabilisticTensorDictSequential(trunk, layer, output)
        assert_equal_outcome(BCLoss(actor, logits_chunk=4), BCLoss(actor, logits_chunk=None), rows)


# -- tied to the embedding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updater", [lambda loss: SoftUpdate(loss, tau=0.5), HardUpdate])
def test_targets_hold_no_embedding_and_read_the_present_one(updater, rows):
    loss = make_tied()
    follow = updater(loss)
    for params in (loss.qvalue_network_params, loss.target_qvalue_network_params):
        assert all(VOCAB not in value.shape for value in params.values(True, True))
    before = loss(rows)["target_qvalue"]
    with torch.no_grad():
        loss.actor_network[1].module.weight.mul_(2)
    assert not torch.isclose(loss(rows)["target_qvalue"], before)
    follow.step()
    assert total(loss(rows)).isfinite()


def test_an_embedding_outside_of_the_loss_is_refused():
    lm, value_lm = (causal_lm("llama", vocab_size=12, layers=1, width=16, heads=2, max_length=32) for _ in range(2))

    def make(embedding):
        head, trunk = modules.TiedQValueHead(16, embedding), language_actor(value_lm)[0]
        return ILQLLoss(language_actor(lm), qvalue_module(head), value_module(ValueHead(16)), value_trunk=trunk)

    make(value_lm.get_input_embeddings())
    with pytest.raises(ValueError, match="an embedding that is not part of this loss"):
        make(value_lm.lm_head)
