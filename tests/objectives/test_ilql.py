"""What is ILQL's own: numbers by hand, targets, where gradients go, how often the trunk runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.objectives.conftest import make_actor, make_heads, make_ilql, make_rows, total
from tests.objectives.oracle import ilql_losses
from tests.objectives.tables import make_table, table_loss
from torchrl_lang.objectives import ILQLLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def table_rows(seed=0, terminated=None, heads=2, vocab=5):
    """Rows with random tables for values and logits, in float64: no number on the way is rounded to float32."""
    g = torch.Generator().manual_seed(seed)
    rows = make_rows(seed=seed)
    rows["tokens"] = torch.where(rows["attention_mask"], rows["tokens"] % vocab, 0)
    if terminated is not None:
        rows["terminated"][:] = terminated
    n, width = rows["tokens"].shape
    shapes = (), (heads, vocab), (heads, vocab), (vocab,)
    tables = [torch.randn(n, width, *shape, generator=g).double() for shape in shapes]
    rows["table"], rows["token_reward"] = make_table(*tables), rows["token_reward"].double()
    return rows, [table.numpy() for table in tables]


OPTIONS = [
    {},
    {"gamma": 0.5, "expectile": 0.9},
    {"target": "mc"},
    {"target": "mc", "gamma": 0.9, "turn_gamma": 0.6},
    {"target": "lambda", "gamma": 0.9, "turn_gamma": 0.6},
    {"target": "lambda", "lmbda": 0.6},
    {"target": "lambda", "lmbda": 1.0},
    {"advantage_temperature": 2.0, "weight_clip": 1.5, "transition_weight": 2.0},
    {"advantage_weighting": "sign", "advantage_temperature": 0.8},
    {"value_min": -0.3, "value_max": 0.2},
    {"margin_weight": 1.0, "margin": 0.4, "cql_temperature": 0.5},
    {"actor_normalizer": "action"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_terms_match_plain_loops(options, heads):
    rows, tables = table_rows(heads=heads)
    out = table_loss(heads, 5, cql_weight=1.0, **options).double()(rows)
    names = {"advantage_temperature": "beta", "advantage_weighting": "weighting", "weight_clip": "clip"}
    names["actor_normalizer"] = "normalizer"
    plain = {names.get(key, key): value for key, value in options.items() if key != "margin_weight"}
    expected = ilql_losses({key: value.numpy() for key, value in rows.items() if key != "table"}, *tables, **plain)
    for term, value in expected.items():
        if term == "margin" and "margin_weight" not in options:
            continue
        np.testing.assert_allclose(out[f"loss_{term}"].item(), value, rtol=1e-11, err_msg=term)


def two_turns(*, terminated):
    """Two utterances of two tokens, a reply between them; V = (1, 2, 3, 4), after the end 5; target Q = (6, .., 9)."""
    agent = torch.tensor([[False, True, True, False, True, True]])
    rows = TensorDict(
        tokens=agent.long(),
        attention_mask=torch.ones(1, 6, dtype=torch.bool),
        agent_mask=agent,
        token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0, 0.0, -1.0]]),
        terminated=torch.tensor([[terminated]]),
        batch_size=[1],
    )
    v = torch.tensor([[1.0, 2.0, 0.0, 3.0, 4.0, 5.0]])
    q, target_q = torch.zeros(1, 6, 1, 2), torch.zeros(1, 6, 1, 2)
    target_q[0, :, 0, 1] = torch.tensor([6.0, 7.0, 0.0, 8.0, 9.0, 0.0])
    rows["table"] = make_table(v, q, target_q, torch.zeros(1, 6, 2))
    return rows


def targets(rows, **options):
    """What V and Q (which is 0) regress on at the four decisions, found from the squared errors."""
    loss = table_loss(1, 2, cql_weight=0.0, expectile=0.5, reduction="none", **options)
    out = loss(rows)
    places = [0, 1, 3, 4]
    value = rows["table"][0, places, 0]
    return value + (2 * out["loss_value"][0, places]).sqrt(), out["loss_qvalue"][0, places].sqrt()


def test_two_clocks_by_hand():
    """lambda 1 and gamma 1 within an utterance, lambda 0 and gamma 0.5 at its end."""
    clocks = {"target": "lambda", "gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 0.0}
    value, qvalue = targets(two_turns(terminated=False), **clocks)
    # The first utterance: V regresses at both tokens on Q of its end, plus the rewards up to there (none).
    # The second one has no reply after it, so its end is a step like the others: r + V(end) = -1 + 5.
    torch.testing.assert_close(value, torch.tensor([7.0, 7.0, 4.0, 4.0]))
    # r + gamma V(s'), without a discount inside: 2, |-1 + 0.5 * 3|, 4, -1 + 5
    torch.testing.assert_close(qvalue, torch.tensor([2.0, 0.5, 4.0, 4.0]))


def test_the_end_of_an_utterance_without_a_reply_is_found_by_its_token():
    clocks = {"target": "lambda", "gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 0.0}
    rows = two_turns(terminated=False)
    loss = table_loss(1, 2, cql_weight=0.0, expectile=0.5, reduction="none", end_of_action=1, **clocks)
    # Every token is the end of an utterance here (all have id 1), so V regresses on Q itself.
    found = rows["table"][0, [0, 1, 3, 4], 0] + (2 * loss(rows)["loss_value"][0, [0, 1, 3, 4]]).sqrt()
    torch.testing.assert_close(found, torch.tensor([6.0, 7.0, 8.0, 9.0]))


@pytest.mark.parametrize(
    ("lmbda", "terminated", "expected"),
    [
        (0.0, False, [2.0, 0.5, 4.0, 4.0]),
        (1.0, False, [1.0, 1.0, 4.0, 4.0]),  # rewards to go with a bootstrap: -1 + .5 (-1 + 5) = 1
        (1.0, True, [1.5, 1.5, 1.0, 1.0]),  # absolute values of -1 + .5 (-1) and -1
        # From the right: -1 + 5; (4 + 4) / 2; -1 + .5 (3 + 4) / 2; (2 + .75) / 2.
        (0.5, False, [1.375, 0.75, 4.0, 4.0]),
    ],
)
def test_td_lambda_of_q_by_hand(lmbda, terminated, expected):
    _, qvalue = targets(two_turns(terminated=terminated), gamma=1.0, turn_gamma=0.5, qvalue_lmbda=lmbda)
    torch.testing.assert_close(qvalue, torch.tensor(expected))


# -- gradients ---------------------------------------------------------------------------------------------------------


def touched(loss, *terms):
    """Parts of the loss that get a gradient from the sum of the given terms."""
    loss.zero_grad()
    out = loss(make_rows())
    sum(out[term] for term in terms).backward()
    parts = {"qvalue_network_params": "q", "value_network_params": "v", "value_trunk": "value_trunk"}
    found = set()
    for name, parameter in loss.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().sum() > 0:
            found.add(next((part for key, part in parts.items() if name.startswith(key)), "actor"))
    return found


def test_gradients_go_where_they_belong():
    loss = make_ilql(advantage_temperature=1.0)
    assert touched(loss, "loss_value") == {"v", "actor"}
    assert touched(loss, "loss_qvalue", "loss_cql") == {"q", "actor"}
    assert touched(loss, "loss_actor") == {"actor"}
    assert not any(name.startswith("target_") for name, _ in loss.named_parameters())


def test_detached_heads_leave_the_trunk_alone():
    loss = make_ilql(detach_value=True, detach_qvalue=True)
    assert touched(loss, "loss_value", "loss_qvalue", "loss_cql") == {"v", "q"}
    loss = make_ilql(detach_actor=True)
    loss.zero_grad()
    loss(make_rows())["loss_actor"].backward()
    trained = [name for name, p in loss.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert all("wte" in name or "lm_head" in name for name in trained)  # the head is tied to the embedding


def test_one_pass_of_the_trunk_and_one_per_trunk_asked_for(passes):
    assert passes(make_ilql()) == [True]
    assert passes(make_ilql(value_trunk=make_actor(seed=3)[0])) == [True, True]
    assert passes(make_ilql(target_trunk=True)) == [False, True]
    assert passes(make_ilql(value_trunk=make_actor(seed=3)[0], target_trunk=True)) == [False, True, True]
    assert passes(make_ilql(value_trunk=make_actor(seed=3)[0], actor_weight=0)) == [True]  # the policy rests


def test_heads_run_at_decisions_only_and_the_target_at_the_taken_action(rows):
    loss = make_ilql(cql_weight=0.0)
    seen = []
    head = loss.qvalue_network.module
    full, taken = head.forward, head.taken
    head.forward = lambda hidden: seen.append(("full", len(hidden))) or full(hidden)
    head.taken = lambda hidden, action: seen.append(("taken", len(hidden))) or taken(hidden, action)
    loss(rows)
    n = int(rows["agent_mask"][:, 1:].sum())
    assert seen == [("taken", n), ("taken", n)]
    seen.clear()
    loss.cql_weight = 0.1
    loss(rows)
    assert seen == [("full", n), ("taken", n)]


def test_a_head_without_its_input_is_told_where_it_comes_from(rows):
    with pytest.raises(KeyError, match="expose_pre_norm=True"):
        ILQLLoss(make_actor(), *make_heads(kind="residual"))(rows)


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_term_of_weight_zero_is_zero(rows):
    out = make_ilql(value_weight=0, qvalue_weight=0, cql_weight=0, actor_weight=0)(rows)
    assert float(total(out)) == 0.0
