"""Q heads tied to a token embedding: inner products with its rows, a reference and never a copy."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.modules.toys import CONTROL, WIDTH, tiny_lm
from torchrl_lang.functional import cql_term, margin_term
from torchrl_lang.modules import (
    QValueHead,
    TiedQValueHead,
    UtteranceActor,
    ValueGuidance,
    causal_lm,
    default_qvalue_head,
    fit_vocabulary,
    language_actor,
    load_language_model,
    qvalue_module,
    save_language_model,
)

N, H, D, V = 7, 8, 6, 300
BOTH = pytest.mark.parametrize("kind", ["mlp", "residual"])


def tied(vocab_size=V, seed=0, **options):
    """A head with values of the order of one, tied to an embedding of another width than the states."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(vocab_size, D)
    head = TiedQValueHead(H, embedding, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.double(), embedding.double()


def data(vocab_size=V):
    torch.manual_seed(1)
    return torch.randn(N, H, dtype=torch.float64, requires_grad=True), torch.randint(vocab_size, (N,))


@BOTH
@pytest.mark.parametrize("n_heads", [1, 3])
def test_values_are_inner_products_with_the_embedding_and_one_level_for_all_tokens(kind, n_heads):
    head, embedding = tied(kind=kind, n_heads=n_heads)
    hidden, action = data()
    values = head(hidden)
    assert values.shape == (N, n_heads, V)
    torch.testing.assert_close(head.taken(hidden, action), values[torch.arange(N), :, action])
    torch.testing.assert_close(head.cql_term(hidden, action).each, cql_term(values, action))
    for k in range(n_heads):
        out = head.features(hidden)[k] @ head.out_weight[k].T + head.out_bias[k]
        torch.testing.assert_close(values[:, k], out[:, :D] @ embedding.weight.T + out[:, D:])


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "term", "option"), [("cql_term", cql_term, 0.7), ("margin_term", margin_term, 0.2)])
def test_terms_in_pieces_are_those_of_the_full_table(name, term, option, recompute, detach):
    head, embedding = tied(5, n_heads=3, detach_embedding=detach)
    hidden, action = data(5)
    expected = term(head(hidden), action, option)
    total, each, taken = getattr(head, name)(hidden, action, option, chunk_size=4, recompute=recompute)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, expected.sum())
    torch.testing.assert_close(taken, head.taken(hidden, action))
    leaves = [hidden, *head.parameters()] + ([] if detach else [embedding.weight])
    weight = torch.rand(N, 3, dtype=torch.float64)
    table = head(hidden).gather(-1, action[:, None, None].expand(-1, 3, 1)).squeeze(-1)
    for ours, plain in (
        (total + (taken * weight).sum(), expected.sum() + (table * weight).sum()),
        ((each * weight).sum(), (expected * weight).sum()),
    ):
        gradients = torch.autograd.grad(ours, leaves, retain_graph=True)
        for a, b in zip(gradients, torch.autograd.grad(plain, leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("vocab_size", [40, V])  # either side of where rows are collected
def test_taken_is_the_row_of_the_full_table_gradients_too(vocab_size, detach):
    head, embedding = tied(vocab_size, detach_embedding=detach)
    hidden, action = data(vocab_size)
    full = head(hidden).gather(-1, action[:, None, None].expand(-1, 2, 1)).squeeze(-1)
    taken = head.taken(hidden, action)
    torch.testing.assert_close(taken, full)
    leaves = [hidden, *head.parameters()] + ([] if detach else [embedding.weight])
    for a, b in zip(
        torch.autograd.grad(taken.square().sum(), leaves), torch.autograd.grad(full.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_by_default_values_leave_the_embedding_alone():
    head, embedding = tied()
    hidden, action = data()
    (head(hidden).sum() + head.taken(hidden, action).sum() + head.cql_term(hidden, action).total).backward()
    assert embedding.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_nothing_of_its_own_is_as_large_as_the_vocabulary():
    head, embedding = tied()
    assert all(V not in value.shape for value in head.state_dict().values())
    assert not any(p is embedding.weight for p in head.parameters())
    assert list(head.modules()) == [head, head.dropout]
    twin = TiedQValueHead(**head.config(), embedding=embedding).double()
    twin.load_state_dict(head.state_dict())
    hidden, _ = data()
    torch.testing.assert_close(twin(hidden), head(hidden))


def test_it_follows_the_embedding_when_that_grows_or_changes_type():
    lm = tiny_lm()
    head, hidden = TiedQValueHead(WIDTH, lm.get_output_embeddings()), torch.randn(2, WIDTH)
    before = head.vocab_size
    fit_vocabulary(lm, before + 5)
    assert head.vocab_size == before + 5
    assert head(hidden).shape == (2, 2, before + 5)
    lm.double()
    assert head.double()(hidden.double()).dtype == torch.float64


def test_copies_share_the_embedding_unless_the_model_comes_along():
    lm = tiny_lm()
    head = TiedQValueHead(WIDTH, lm.get_output_embeddings())
    alone = deepcopy(head)
    assert alone.embedding is head.embedding
    assert alone.out_weight is not head.out_weight
    policy = UtteranceActor(language_actor(lm), CONTROL, 3, guidance=ValueGuidance(qvalue_module(head), beta=1.0))
    for copied in (deepcopy(policy), pickle.loads(pickle.dumps(policy))):  # noqa: S301
        layer, theirs = copied.decoder.actor[1].module, copied.decoder.rule.guidance.qvalue.module
        assert theirs.embedding is layer
        assert layer is not head.embedding


def test_a_copied_value_trunk_is_what_its_copied_head_reads():
    trunk = language_actor(tiny_lm())[0].module
    head = TiedQValueHead(WIDTH, trunk.model.get_input_embeddings())
    guidance = deepcopy(ValueGuidance(head, beta=1.0, value_trunk=trunk))
    assert guidance.qvalue.embedding is guidance.value_trunk.module.model.get_input_embeddings()
    assert guidance.qvalue.embedding is not head.embedding


@pytest.mark.parametrize("which", ["output", "input"])
def test_a_saved_run_comes_back_tied(tmp_path, which):
    lm = tiny_lm("llama")  # with two embeddings
    embedding = lm.get_input_embeddings() if which == "input" else lm.get_output_embeddings()
    head = TiedQValueHead(WIDTH, embedding, n_heads=3, detach_embedding=False)
    save_language_model(tmp_path, language_actor(lm), {"qvalue": head})
    saved = load_language_model(tmp_path)
    loaded = saved.heads["qvalue"]
    assert loaded.embedding is getattr(saved.lm, f"get_{which}_embeddings")()
    assert loaded.config() == head.config()
    hidden = torch.randn(3, WIDTH)
    torch.testing.assert_close(loaded(hidden), head(hidden))
    assert (tmp_path / "heads.safetensors").stat().st_size < 4 * sum(p.numel() for p in head.parameters()) + 2000


def test_a_head_of_another_model_is_not_saved(tmp_path):
    head = TiedQValueHead(WIDTH, tiny_lm().get_output_embeddings())
    with pytest.raises(ValueError, match="'qvalue' is tied to an embedding that is not in the language model"):
        save_language_model(tmp_path / "new", tiny_lm(), {"qvalue": head})
    assert not (tmp_path / "new").exists()


def test_the_default_head_is_tied_where_the_vocabulary_is_large():
    """More than 16,384 ids; the option decides otherwise."""
    lm = {n: causal_lm(vocab_size=n, layers=1, width=4, heads=2, max_length=8) for n in (16_384, 16_385)}
    assert isinstance(default_qvalue_head(lm[16_384]), QValueHead)
    assert default_qvalue_head(lm[16_385], n_heads=1).embedding is lm[16_385].get_output_embeddings()
    assert isinstance(default_qvalue_head(lm[16_385], tied=False), QValueHead)
    assert default_qvalue_head(lm[16_384], tied=True).vocab_size == 16_384
