"""Value heads: separate networks in one module, tied to an embedding or not; terms in pieces equal the full table's."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from tests.modules.toys import CONTROL, WIDTH, tiny_lm
from torchrl_lang import modules
from torchrl_lang.functional import cql_term
from torchrl_lang.functional.value_terms import margin_term
from torchrl_lang.modules.language_model import fit_vocabulary

N, H, D = 10, 8, 6
KINDS = pytest.mark.parametrize("kind", ["mlp", "deep"])
ALL = pytest.mark.parametrize("which", ["mlp", "deep", "tied", "trained"])


def one_by_one(head, hidden):
    """Each head with torch's own layers: ``[N, n_q, V]``."""
    out = []
    for k in range(head.out_weight.shape[0]):
        if head.kind == "mlp":
            x = F.linear(hidden, head.in_weight[k], head.in_bias[k]).relu()
        else:
            x = F.linear(hidden, head.in_weight[k], head.in_bias[k])
            x = F.layer_norm(x, (2 * H,), head.norm1_weight[k, 0], head.norm1_bias[k, 0]).relu()
            x = F.linear(x, head.mid_weight[k], head.mid_bias[k])
            x = F.layer_norm(x, (2 * H,), head.norm2_weight[k, 0], head.norm2_bias[k, 0]).relu()
        out.append(F.linear(x, head.out_weight[k], head.out_bias[k]))
    return torch.stack(out, -2)


def shaken(head):
    """Give every parameter, the ones and zeros too, a value of its own."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.double()


def head_of(which, vocab_size, n_heads=3):
    """A head, the leaves that its values train, and states; tied ones have embeddings of another width."""
    torch.manual_seed(0)
    hidden, embedding = torch.randn(N, H, dtype=torch.float64, requires_grad=True), nn.Embedding(vocab_size, D).double()
    if which in ("tied", "trained"):
        head = modules.TiedQValueHead(H, embedding, n_heads=n_heads, detach_embedding=which == "tied")
    else:
        head = modules.QValueHead(H, vocab_size, n_heads=n_heads, kind=which)
    return shaken(head), [hidden, *head.parameters(), *([embedding.weight] if which == "trained" else [])], hidden


def same_gradients(pairs, leaves):
    for pair in pairs:
        ours, plain = (torch.autograd.grad(value, leaves, retain_graph=True) for value in pair)
        torch.testing.assert_close(ours, plain)


@KINDS
@pytest.mark.parametrize("n_heads", [1, 3])
def test_stacked_heads_are_separate_networks(kind, n_heads):
    head, _, hidden = head_of(kind, 5, n_heads)
    values = head(hidden)
    assert values.shape == (N, n_heads, 5)
    torch.testing.assert_close(values, one_by_one(head, hidden))
    gradient = torch.autograd.grad(values[:, 0].sum(), head.in_weight)[0]
    assert gradient[0].abs().sum() > 0
    assert gradient[1:].abs().sum() == 0


@ALL
@pytest.mark.parametrize("vocab_size", [5, 300])  # either side of where rows are gathered
def test_taken_is_the_row_of_the_full_table_gradients_too(which, vocab_size):
    head, leaves, hidden = head_of(which, vocab_size)
    action, weight = torch.randint(vocab_size, (N,)), torch.randn(N, 3)
    full = head(hidden).gather(-1, action[:, None, None].expand(-1, 3, 1)).squeeze(-1)
    taken = head.taken(hidden, action)
    torch.testing.assert_close(taken, full)
    same_gradients([((taken * weight).sum(), (full * weight).sum())], leaves)


@ALL
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "term", "option"), [("cql_term", cql_term, 0.7), ("margin_term", margin_term, 0.2)])
def test_terms_in_pieces_are_those_of_the_full_table(which, name, term, option, recompute):
    head, leaves, hidden = head_of(which, 5)
    action, weight = torch.randint(5, (N,)), torch.rand(N, 3, dtype=torch.float64)
    expected = term(head(hidden), action, option)
    total, each, taken = getattr(head, name)(hidden, action, option, chunk_size=4, recompute=recompute)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, expected.sum())
    full = head.taken(hidden, action)
    torch.testing.assert_close(taken, full)
    plain = expected.sum() + (full * weight).sum()
    same_gradients(
        [(total + (taken * weight).sum(), plain), ((each * weight).sum(), (expected * weight).sum())], leaves
    )


@KINDS
def test_first_values_are_near_zero_and_heads_differ(kind):
    torch.manual_seed(0)
    values = modules.QValueHead(64, 35, kind=kind)(torch.randn(200, 64))
    assert values.abs().mean() < 0.1
    assert (values[:, 0] - values[:, 1]).abs().mean() > 0.01


@KINDS
def test_values_of_states_and_utterances_and_their_modules(kind):
    hidden = torch.randn(2, 3, H, dtype=torch.float64)
    pairs = (modules.ValueHead, modules.value_module), (modules.UtteranceQValueHead, modules.qvalue_module)
    for make, module in pairs:
        head = shaken(make(H, kind=kind))
        values = head(hidden)
        assert values.shape == (2, 3, head.out_weight.shape[0])
        torch.testing.assert_close(values, one_by_one(head, hidden).squeeze(-1))
        twin = type(head)(**head.config()).double()
        twin.load_state_dict(head.state_dict())
        out = module(twin)(TensorDict(hidden=hidden, batch_size=[2, 3]))
        torch.testing.assert_close(out["state_value" if module is modules.value_module else "utterance_value"], values)
    config = modules.QValueHead(H, 5, n_heads=3, kind=kind).config()
    assert config == {"width": H, "vocab_size": 5, "n_heads": 3, "kind": kind, "normalize": False}


@pytest.mark.parametrize("which", ["mlp", "deep", "tied"])
def test_normalized_heads_read_scaled_and_clipped_states_and_begin_at_zero(which):
    torch.manual_seed(0)
    hidden, lm = torch.randn(N, H, dtype=torch.float64), tiny_lm()
    hidden[:, 0] *= 50
    options = {"tied": which == "tied", "kind": "mlp" if which == "tied" else which}
    lm.config.hidden_size = H
    head, plain = (modules.default_qvalue_head(lm, normalize=on, **options).double() for on in (True, False))
    assert not head(hidden).any()
    plain.load_state_dict(shaken(head).state_dict())
    spread = hidden.abs().sort(-1).values[:, [H // 2 - 1]] / 0.6745  # of normal numbers, whose quartile is 0.6745
    read = torch.maximum(torch.minimum(hidden / spread, torch.tensor(3.0)), torch.tensor(-3.0))
    torch.testing.assert_close(head(hidden), plain(read))
    torch.testing.assert_close(head(1000 * hidden), head(hidden))
    assert head(torch.zeros(2, H, dtype=torch.float64)).isfinite().all()


def explained_of_updates(normalize, updates):
    """Explained variance before each update, where a few of 64 dimensions of the states are 50 times the others."""
    torch.manual_seed(0)
    head, explained = modules.ValueHead(64, normalize=normalize), []
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for _ in range(updates):
        states = torch.randn(1024, 64)
        target = states[:, 8:16].sum(-1) / 8**0.5
        states[:, :4] *= 50
        for part in torch.arange(1024).split(128):
            value = head(states[part]).squeeze(-1)
            if part[0] == 0:
                explained.append(1 - float((target[part] - value.detach()).var() / target[part].var()))
            optimizer.zero_grad()
            (value - target[part]).square().mean().backward()
            optimizer.step()
    return explained


def test_normalized_heads_explain_values_of_states_with_large_dimensions():
    plain, normalized = explained_of_updates(False, 3), explained_of_updates(True, 3)
    assert min(plain) < -1
    assert min(normalized) >= 0
    assert normalized[-1] > 0.7


@KINDS
def test_tied_values_are_inner_products_with_the_embedding_and_one_level_for_all_tokens(kind):
    torch.manual_seed(0)
    embedding, hidden = nn.Embedding(300, D).double(), torch.randn(N, H, dtype=torch.float64)
    head = shaken(modules.TiedQValueHead(H, embedding, kind=kind))
    values = head(hidden)
    for k in range(2):
        out = head.features(hidden)[k] @ head.out_weight[k].T + head.out_bias[k]
        torch.testing.assert_close(values[:, k], out[:, :D] @ embedding.weight.T + out[:, D:])
    values.sum().backward()
    assert embedding.weight.grad is None  # by default
    assert all(300 not in value.shape for value in head.state_dict().values())
    assert list(head.modules()) == [head]
    twin = modules.TiedQValueHead(**head.config(), embedding=embedding).double()
    twin.load_state_dict(head.state_dict())
    torch.testing.assert_close(twin(hidden), values)


def test_a_tied_head_follows_the_embedding_when_that_grows_or_changes_type():
    lm = tiny_lm()
    head, hidden = modules.TiedQValueHead(WIDTH, lm.get_output_embeddings()), torch.randn(2, WIDTH)
    before = head.vocab_size
    fit_vocabulary(lm, before + 5)
    assert head(hidden).shape == (2, 2, before + 5)
    lm.double()
    assert head.double()(hidden.double()).dtype == torch.float64


def test_copies_share_the_embedding_unless_the_model_comes_along():
    lm = tiny_lm()
    head = modules.TiedQValueHead(WIDTH, lm.get_output_embeddings())
    alone = deepcopy(head)
    assert alone.embedding is head.embedding
    assert alone.out_weight is not head.out_weight
    guidance = modules.ValueGuidance(modules.qvalue_module(head), beta=1.0)
    policy = modules.UtteranceActor(modules.language_actor(lm), CONTROL, 3, guidance=guidance)
    for copied in (deepcopy(policy), pickle.loads(pickle.dumps(policy))):  # noqa: S301
        layer, theirs = copied.decoder.actor[1].module, copied.decoder.rule.guidance.qvalue.module
        assert theirs.embedding is layer
        assert layer is not head.embedding
    trunk = modules.language_actor(lm)[0].module
    head = modules.TiedQValueHead(WIDTH, trunk.model.get_input_embeddings())
    guidance = deepcopy(modules.ValueGuidance(head, beta=1.0, value_trunk=trunk))
    assert guidance.qvalue.embedding is guidance.value_trunk.module.model.get_input_embeddings()
    assert guidance.qvalue.embedding is not head.embedding


@pytest.mark.parametrize("which", ["output", "input"])
def test_a_saved_head_comes_back_tied(tmp_path, which):
    lm = tiny_lm("llama")  # with two embeddings
    embedding = lm.get_input_embeddings() if which == "input" else lm.get_output_embeddings()
    head = modules.TiedQValueHead(WIDTH, embedding, n_heads=3, detach_embedding=False)
    modules.save_language_model(tmp_path, modules.language_actor(lm), {"qvalue": head})
    saved = modules.load_language_model(tmp_path)
    loaded = saved.heads["qvalue"]
    assert loaded.embedding is getattr(saved.lm, f"get_{which}_embeddings")()
    assert loaded.config() == head.config()
    hidden = torch.randn(3, WIDTH)
    torch.testing.assert_close(loaded(hidden), head(hidden))
    assert (tmp_path / "heads.safetensors").stat().st_size < 4 * sum(p.numel() for p in head.parameters()) + 2000
    with pytest.raises(ValueError, match="'qvalue' is tied to an embedding that is not in the language model"):
        modules.save_language_model(tmp_path / "new", tiny_lm(), {"qvalue": head})
    assert not (tmp_path / "new").exists()


def test_the_default_head_is_tied_where_the_vocabulary_is_large():
    """More than 16,384 ids; the option decides otherwise."""
    lm = {n: modules.causal_lm(vocab_size=n, layers=1, width=4, heads=2, max_length=8) for n in (16_384, 16_385)}
    assert isinstance(modules.default_qvalue_head(lm[16_384]), modules.QValueHead)
    assert modules.default_qvalue_head(lm[16_385], n_heads=1).embedding is lm[16_385].get_output_embeddings()
    assert isinstance(modules.default_qvalue_head(lm[16_385], tied=False), modules.QValueHead)
    assert modules.default_qvalue_head(lm[16_384], tied=True).vocab_size == 16_384
