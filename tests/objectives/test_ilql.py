"""What is ILQL's own: numbers by hand, targets, where gradients go, how often the trunk runs."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from tests.objectives.models import by_hand, make_actor, make_heads, make_ilql, make_rows, vary
from tests.objectives.oracle import assert_matches, ilql_losses, numpy_rows, utterance_ilql_losses
from tests.objectives.tables import TableQ, make_table, table_loss, table_networks, with_own_targets
from torchrl_lang.objectives import ILQLLoss, UtteranceILQLLoss

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


NAMES = {"advantage_temperature": "beta", "advantage_weighting": "weighting", "weight_clip": "clip"}
NAMES["actor_normalizer"] = "normalizer"


def of_oracle(options):
    """The options that the plain loops know, by their names there."""
    return {NAMES.get(key, key): value for key, value in options.items() if key not in ("logits_chunk", "beta")}


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
    {"margin": 0.4, "cql_temperature": 0.5},
    {"actor_normalizer": "action"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_terms_match_plain_loops(options, heads):
    rows, tables = table_rows(heads=heads)
    out = table_loss(heads, 5, cql_weight=1.0, margin_weight=1.0, **options).double()(rows)
    assert_matches(out, ilql_losses(numpy_rows(rows), *tables, **of_oracle(options)), "loss_", rtol=1e-11)


class OneNumber(TableQ):
    """A table's Q of the first token alone."""

    def forward(self, hidden):
        return super().forward(hidden)[..., 0]


UTTERANCES = [
    {},
    {"gamma": 0.5, "expectile": 0.9},
    {"advantage_temperature": 2.0, "weight_clip": 1.5, "transition_weight": 2.0},
    {"advantage_weighting": "sign", "advantage_temperature": 0.8},
    {"actor_normalizer": "action", "advantage_temperature": 0.5},
    {"end_of_action": 3, "advantage_temperature": 1.0},
]


@pytest.mark.parametrize("variant", ["all", "train-mask"])
@pytest.mark.parametrize("options", UTTERANCES, ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_terms_of_utterances_match_plain_loops(options, heads, variant):
    rows, (v, q, target_q, logits) = table_rows(seed=heads, heads=heads)
    actor, _, value = table_networks(heads, 5)
    qvalue = TensorDictModule(OneNumber(heads, 5), in_keys=["hidden"], out_keys=["utterance_value"])
    out = with_own_targets(UtteranceILQLLoss(actor, qvalue, value, **options)).double()(vary(rows, variant))
    tables = v, q[..., 0], target_q[..., 0], logits
    assert_matches(out, utterance_ilql_losses(numpy_rows(rows), *tables, **of_oracle(options)), "loss_", rtol=1e-11)


def two_turns(*, terminated):
    """Two utterances of two tokens, a reply between them; V = (1, 2, 3, 4), after the end 5; target Q = (6, .., 9)."""
    agent = [[0, 1, 1, 0, 1, 1]]
    rows = by_hand(agent, agent, [[0.0, 0.0, -1.0, 0.0, 0.0, -1.0]], terminated=terminated)
    v = torch.tensor([[1.0, 2.0, 0.0, 3.0, 4.0, 5.0]])
    q, target_q = torch.zeros(1, 6, 1, 2), torch.zeros(1, 6, 1, 2)
    target_q[0, :, 0, 1] = torch.tensor([6.0, 7.0, 0.0, 8.0, 9.0, 0.0])
    rows["table"] = make_table(v, q, target_q, torch.zeros(1, 6, 2))
    return rows


CLOCKS = {"target": "lambda", "gamma": 1.0, "lmbda": 1.0, "turn_gamma": 0.5, "turn_lmbda": 0.0}


def targets(terminated=False, **options):
    """What V and Q (which is 0) regress on at the four decisions, found from the squared errors."""
    rows, places = two_turns(terminated=terminated), [0, 1, 3, 4]
    out = table_loss(1, 2, cql_weight=0.0, expectile=0.5, reduction="none", **options)(rows)
    value = rows["table"][0, places, 0]
    return value + (2 * out["loss_value"][0, places]).sqrt(), out["loss_qvalue"][0, places].sqrt()


def test_two_clocks_by_hand():
    """lambda 1 and gamma 1 within an utterance, lambda 0 and gamma 0.5 at its end."""
    value, qvalue = targets(**CLOCKS)
    # The first utterance: V regresses at both tokens on Q of its end, plus the rewards up to there (none).
    # The second one has no reply after it, so its end is a step like the others: r + V(end) = -1 + 5.
    torch.testing.assert_close(value, torch.tensor([7.0, 7.0, 4.0, 4.0]))
    # r + gamma V(s'), without a discount inside: 2, |-1 + 0.5 * 3|, 4, -1 + 5
    torch.testing.assert_close(qvalue, torch.tensor([2.0, 0.5, 4.0, 4.0]))
    # Where all tokens (of id 1) are ends of utterances, V regresses on Q itself.
    torch.testing.assert_close(targets(**CLOCKS, end_of_action=1)[0], torch.tensor([6.0, 7.0, 8.0, 9.0]))


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
    _, qvalue = targets(terminated, gamma=1.0, turn_gamma=0.5, qvalue_lmbda=lmbda)
    torch.testing.assert_close(qvalue, torch.tensor(expected))


def test_a_detached_policy_leaves_the_trunk_alone():
    loss = make_ilql(detach_actor=True)
    loss(make_rows())["loss_actor"].backward()
    trained = [name for name, p in loss.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert all("wte" in name or "lm_head" in name for name in trained)  # the head is tied to the embedding


def test_a_head_without_its_input_is_told_where_it_comes_from(rows):
    qvalue = TensorDictModule(make_heads()[0].module, ["state"], ["action_value"])
    with pytest.raises(KeyError, match=r"state.*The trunk must write it"):
        ILQLLoss(make_actor(), qvalue, make_heads()[1])(rows)
