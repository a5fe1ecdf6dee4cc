"""CQL, BCQ and psi-learning: plain loops, numbers by hand, what is left out of the backup, where gradients go."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
import torch

from tests.objectives.models import VOCAB, WIDTH, make_actor, make_heads, make_qbackup, make_rows, vary
from tests.objectives.oracle import numpy_rows, qbackup_losses
from tests.objectives.tables import table_loss, table_networks, with_own_targets
from tests.objectives.test_ilql import of_oracle, table_rows
from torchrl_lang.modules import QValueHead, UtteranceActor, qvalue_module, row_log_prob
from torchrl_lang.objectives import BCQLoss, CQLLoss, PsiLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

KINDS = {"cql": CQLLoss, "bcq": BCQLoss, "psi": PsiLoss}
CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=(3,))


def q_loss(kind, heads=2, vocab=5, action_length=None, **options):
    """The loss over tables; with an ``action_length`` over an utterance actor."""
    actor, qvalue, _ = table_networks(heads, vocab)
    if action_length is not None:
        actor = UtteranceActor(actor, CONTROL, action_length, cached=False)
    return with_own_targets(KINDS[kind](actor, qvalue, **options))


COMMON = [
    {},
    {"gamma": 0.5, "turn_gamma": 0.9},
    {"turn_gamma": 0.5, "end_of_action": 1},
    {"value_min": -0.3, "value_max": 0.2},
    {"transition_weight": 0.3},
    {"actor_normalizer": "action"},
    {"logits_chunk": 2},
]
VARIANTS = ["one-head", "train-mask", "utterances", "all-terminated"]
OPTIONS = [(kind, options) for kind in KINDS for options in COMMON] + [
    ("cql", {"cql_temperature": 0.5}),
    ("bcq", {"threshold": 0.3}),
    ("bcq", {"threshold": 0.9}),
    ("bcq", {"threshold": 1.0}),
    ("psi", {"reward_scale": 0.1}),
    ("psi", {"threshold": 0.3}),
]


UNWEIGHTED = {"cql": {"cql_weight": 1.0}, "bcq": {"threshold": 0.0}, "psi": {}}


@pytest.mark.parametrize(("case", "variant"), [*zip(OPTIONS, cycle(VARIANTS), strict=False)], ids=str)
def test_terms_match_plain_loops(case, variant):
    kind, options = case
    heads = 1 if variant == "one-head" else 2
    rows, (_, *tables) = table_rows(seed=3, heads=heads)
    length = 2 if variant == "utterances" else None
    out = q_loss(kind, heads, action_length=length, **{**UNWEIGHTED[kind], **options}).double()(vary(rows, variant))
    plain = of_oracle(options)
    if length is not None:
        plain |= {"end_of_action": 1, "forbidden": (0, 3), "action_length": length}
    expected = qbackup_losses(numpy_rows(rows), *tables, kind, **plain)
    for term in ("qvalue", "cql", "actor") if kind == "cql" else ("qvalue", "actor"):
        np.testing.assert_allclose(out[f"loss_{term}"].item(), expected[term], rtol=1e-11, err_msg=term)


# -- what the backup reads ---------------------------------------------------------------------------------------------


def raised(kind, rows, **options):
    """How ``loss_qvalue`` changes where an unlikely token looks better than all others, to both Q networks."""
    changed = rows.clone()
    changed["table"][..., 1:21].unflatten(-1, (2, 2, 5))[..., 4] += 50.0
    changed["table"][..., 21:][..., 4] -= 50.0
    loss = table_loss(2, 5, cql_weight=0.0) if kind == "ilql" else q_loss(kind, **options)
    return (loss(changed)["loss_qvalue"] - loss(rows)["loss_qvalue"]).item()


def test_where_the_relatives_differ():
    """A token never taken, with a high value by error: CQL's and psi's targets believe it, ILQL's and BCQ's do not."""
    rows, _ = table_rows(terminated=False)
    rows["tokens"].clamp_max_(3)
    for kind, options, believes in (
        ("ilql", {}, False),
        ("cql", {}, True),
        ("psi", {}, True),
        ("bcq", {"threshold": 0.1}, False),
        ("bcq", {"threshold": 0.0}, True),  # without its constraint
    ):
        assert (abs(raised(kind, rows, **options)) > 5) == believes, kind


@pytest.mark.parametrize("kind", KINDS)
def test_the_backup_is_computed_in_chunks(kind, rows):
    loss = make_qbackup(KINDS[kind], logits_chunk=4, **({"cql_weight": 0.0} if kind == "cql" else {}))
    head, seen = loss.qvalue_network.module, []
    full = head.forward
    head.forward = lambda hidden: seen.append(len(hidden)) or full(hidden)
    loss(rows)
    assert max(seen) == 4


# -- psi-learning's prior ----------------------------------------------------------------------------------------------


def test_a_frozen_prior_takes_the_actors_place(rows):
    """Of equal weights it changes nothing; of others, the targets by the difference of the log-probabilities."""
    own = make_qbackup(PsiLoss, gamma=0.0)
    same = make_qbackup(PsiLoss, gamma=0.0, prior=frozen_copy(make_actor()))
    for name, value in own(rows).items():
        torch.testing.assert_close(same(rows)[name], value)
    other = make_qbackup(PsiLoss, gamma=0.0, prior=frozen_copy(make_actor(seed=7)))
    agent = rows["agent_mask"]
    difference = (row_log_prob(make_actor(seed=7), rows) - row_log_prob(make_actor(), rows))[agent].mean()
    assert abs(difference) > 1e-3
    torch.testing.assert_close(other(rows)["td_target"] - own(rows)["td_target"], difference, rtol=1e-4, atol=1e-5)


def test_a_prior_that_changed_is_an_error(rows):
    actor = make_actor(seed=7).requires_grad_(False)
    loss = make_qbackup(PsiLoss, prior=frozen_copy(actor))  # shares the frozen weights
    actor[1].module.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="The reference changed"):
        loss(rows)


def test_cql_by_torchrls_names():
    """TorchRL's CQL term is ``T`` times the cross-entropy at temperature ``T``."""
    loss = make_qbackup(CQLLoss, temperature=0.5, min_q_weight=3.0)
    assert (loss.cql_temperature, loss.cql_weight) == (0.5, 1.5)
    assert make_qbackup(CQLLoss).cql_weight == 0.1
    for name in ("loss_function", "with_lagrange"):
        with pytest.raises(TypeError, match=f"CQLLoss has no argument '{name}'"):
            make_qbackup(CQLLoss, **{name: True})
    with pytest.raises(TypeError, match=r"cql_weight=0\.1 and min_q_weight=3\.0 are one weight: give one"):
        make_qbackup(CQLLoss, cql_weight=0.1, min_q_weight=3.0)


@pytest.mark.parametrize("kind", [BCQLoss, PsiLoss])
def test_a_matrix_larger_than_the_vocabulary(kind):
    """The policy's logits have more columns than Q, which has those that the policy can write."""
    padded = UtteranceActor(make_actor(), CONTROL, 4, vocab_size=VOCAB - 2)
    small = qvalue_module(QValueHead(WIDTH, VOCAB - 2))
    rows = make_rows()
    rows["tokens"].clamp_max_(VOCAB - 3)
    assert kind(padded, small, threshold=0.2)(rows)["td_target"].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_only_the_length_writes(kind, rows):
    """It is forbidden, but the one token that is possible in the last slot."""
    endless = UtteranceActor(make_actor(), CONTROL, 2, forbidden=(CONTROL.end_of_action,))
    assert KINDS[kind](endless, make_heads()[0])(rows)["td_target"].isfinite()
