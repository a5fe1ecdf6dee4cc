"""Value heads: separate networks in one module, and terms in pieces equal to those of the full table."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from tests.modules.toys import WIDTH, tiny_lm
from torchrl_lang.functional import cql_term, margin_term
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueHead,
    language_actor,
    load_agent,
    qvalue_module,
    save_agent,
    value_module,
)
from torchrl_lang.text import CharTokenizer

N, H = 10, 8
BOTH = pytest.mark.parametrize("kind", ["mlp", "residual", "deep"])
SIZES = pytest.mark.parametrize("vocab_size", [5, 300])  # either side of where `taken` changes its way


def one_by_one(head, hidden):
    """Each head with torch's own layers: ``[N, n_q, V]``."""
    out = []
    for k in range(head.out_weight.shape[0]):
        if head.kind == "mlp":
            x = F.linear(hidden, head.in_weight[k], head.in_bias[k]).relu()
        elif head.kind == "deep":
            x = F.linear(hidden, head.in_weight[k], head.in_bias[k])
            x = F.layer_norm(x, (2 * H,), head.norm1_weight[k, 0], head.norm1_bias[k, 0]).relu()
            x = F.linear(x, head.mid_weight[k], head.mid_bias[k])
            x = F.layer_norm(x, (2 * H,), head.norm2_weight[k, 0], head.norm2_bias[k, 0]).relu()
        else:
            x = F.layer_norm(hidden, (H,), head.norm1_weight[k, 0], head.norm1_bias[k, 0])
            x = F.gelu(F.linear(x, head.in_weight[k], head.in_bias[k]))
            x = hidden + F.linear(x, head.mid_weight[k], head.mid_bias[k])
            x = F.layer_norm(x, (H,), head.norm2_weight[k, 0], head.norm2_bias[k, 0])
        out.append(F.linear(x, head.out_weight[k], head.out_bias[k]))
    return torch.stack(out, -2)


def shaken(head):
    """Give every parameter, the ones and zeros too, a value of its own."""
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


@BOTH
@pytest.mark.parametrize("n_heads", [1, 2, 3])
def test_stacked_heads_are_separate_networks(kind, n_heads):
    head = shaken(QValueHead(H, 5, n_heads=n_heads, kind=kind))
    hidden = torch.randn(N, H)
    values = head(hidden)
    assert values.shape == (N, n_heads, 5)
    torch.testing.assert_close(values, one_by_one(head, hidden))
    gradient = torch.autograd.grad(values[:, 0].sum(), head.in_weight)[0]
    assert gradient[0].abs().sum() > 0
    assert gradient[1:].abs().sum() == 0


@BOTH
@SIZES
def test_taken_is_the_row_of_the_full_table_gradients_too(kind, vocab_size):
    head = shaken(QValueHead(H, vocab_size, kind=kind))
    hidden, action = torch.randn(N, H, requires_grad=True), torch.randint(vocab_size, (N,))
    full = head(hidden).gather(-1, action[:, None, None].expand(-1, 2, 1)).squeeze(-1)
    taken = head.taken(hidden, action)
    assert taken.shape == (N, 2)
    torch.testing.assert_close(taken, full)
    parameters = [hidden, *head.parameters()]
    weight = torch.randn(N, 2)
    for ours, expected in zip(
        torch.autograd.grad((taken * weight).sum(), parameters),
        torch.autograd.grad((full * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)


@BOTH
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "term", "option"), [("cql_term", cql_term, 0.7), ("margin_term", margin_term, 0.2)])
def test_terms_in_pieces_are_those_of_the_full_table(kind, name, term, option, recompute):
    head = shaken(QValueHead(H, 5, n_heads=3, kind=kind)).double()
    hidden, action = torch.randn(N, H, dtype=torch.float64, requires_grad=True), torch.randint(5, (N,))
    expected = term(head(hidden), action, option)
    total, each, taken = getattr(head, name)(hidden, action, option, chunk_size=4, recompute=recompute)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, expected.sum())
    torch.testing.assert_close(taken, head.taken(hidden, action))
    parameters, weight = [hidden, *head.parameters()], torch.rand(N, 3, dtype=torch.float64)
    for ours, plain in ((total, expected.sum()), ((each * weight).sum(), (expected * weight).sum())):
        gradients = torch.autograd.grad(ours, parameters, retain_graph=True)
        for a, b in zip(gradients, torch.autograd.grad(plain, parameters, retain_graph=True), strict=True):
            torch.testing.assert_close(a, b)


@BOTH
def test_first_values_are_near_zero_and_heads_differ(kind):
    torch.manual_seed(0)
    values = QValueHead(64, 35, kind=kind)(torch.randn(200, 64))
    assert values.abs().mean() < 0.1
    assert (values[:, 0] - values[:, 1]).abs().mean() > 0.01


@BOTH
def test_state_values(kind):
    head = shaken(ValueHead(H, kind=kind))
    hidden = torch.randn(2, 3, H)
    values = head(hidden)
    assert values.shape == (2, 3, 1)
    torch.testing.assert_close(values.reshape(6, 1), one_by_one(head, hidden.reshape(6, H))[:, 0])


@BOTH
def test_config_builds_a_head_of_the_same_shape(kind):
    for head in (QValueHead(H, 5, n_heads=3, kind=kind, dropout=0.1), ValueHead(H, kind=kind)):
        twin = type(head)(**head.config())
        twin.load_state_dict(head.state_dict())
        assert twin.config() == head.config()


@BOTH
def test_tensordict_modules_read_the_right_state(kind):
    states = TensorDict(hidden=torch.randn(N, H), hidden_pre_norm=torch.randn(N, H), batch_size=[N])
    q, v = QValueHead(H, 5, kind=kind), ValueHead(H, kind=kind)
    read = states["hidden_pre_norm" if kind == "residual" else "hidden"]
    torch.testing.assert_close(qvalue_module(q)(states.clone())["action_value"], q(read))
    torch.testing.assert_close(value_module(v)(states.clone())["state_value"], v(read))


def make_head(**options):
    torch.manual_seed(0)
    head = UtteranceQValueHead(WIDTH, **options)
    torch.nn.init.normal_(head.out_weight)
    return head


@pytest.mark.parametrize("kind", ["mlp", "residual"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_one_number_for_each_head(kind, shape):
    head, hidden = make_head(n_heads=3, kind=kind), torch.randn(*shape, WIDTH)
    assert head(hidden).shape == (*shape, 3)
    torch.testing.assert_close(head(hidden).reshape(-1, 3), head.outputs(hidden.reshape(-1, WIDTH))[..., 0].T)
    module = qvalue_module(head)
    assert (module.in_keys, module.out_keys) == ([head.in_key], ["utterance_value"])


def test_a_saved_agent_ranks_by_the_same_values(tmp_path):
    tokenizer = CharTokenizer.from_alphabet("abc")
    lm, ranking = tiny_lm(vocab_size=tokenizer.vocab_size), {"end_value_weight": 2.0, "log_prob_weight": 0.5}
    guidance = UtteranceValueGuidance(make_head())
    policy = UtteranceActor(
        language_actor(lm), tokenizer.control, 4, guidance=guidance, method="best_of", seed=1, **ranking
    )
    loaded = load_agent(save_agent(tmp_path / "agent", policy, tokenizer), seed=1).policy
    assert isinstance(loaded.decoder.rule.guidance, UtteranceValueGuidance)
    tokens = torch.full((5, 6), tokenizer.control.begin_action)
    attention = torch.arange(6).expand(5, 6) < 1
    assert torch.equal(
        *(actor.decoder.generate(tokens, attention, method="best_of").action for actor in (policy, loaded))
    )
