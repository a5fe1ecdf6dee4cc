"""OREO: plain loops, numbers by hand, what gets a gradient, passes of the trunk, the closed form of a bandit."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.objectives.models import by_hand, make_actor, make_heads, make_rows, total, vary
from tests.objectives.oracle import assert_matches, numpy_rows, oreo_losses
from tests.objectives.test_contract import assert_same
from tests.objectives.test_ilql import of_oracle
from tests.objectives.test_qsft import logits_of, uneven
from torchrl_lang.modules import UtteranceActor, ValueHead, row_log_prob
from torchrl_lang.objectives import OREOLoss
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import frozen_copy

CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=(3,))


def make(spoken=False, **options):
    """A policy and a reference whose ratios are far from 1."""

    def written(seed):
        return UtteranceActor(uneven(seed), CONTROL, 20, temperature=0.7) if spoken else uneven(seed)

    weights = {"beta": 0.4, "kl_weight": 1.0}
    return OREOLoss(written(0), make_heads()[1], frozen_copy(written(2)), **{**weights, **options})


def sample_rows(variant):
    rows = vary(make_rows(seed=3), variant)
    if variant == "spoken":  # nothing that the actor cannot write
        rows["tokens"] = torch.where((rows["tokens"] == 3) | (rows["tokens"] == 0), 2, rows["tokens"])
    return rows


def expected_of(loss, rows, variant, **options):
    """Outputs and slopes by plain loops over what the networks say."""
    logits = [logits_of(uneven(seed), rows) for seed in (0, 2)]
    tables = [table / 0.7 if variant == "spoken" else table for table in logits]
    if variant == "spoken":
        for table in tables:
            table[..., [0, 3]] = -1e9
    log_probs = [torch.from_numpy(table).log_softmax(-1).numpy() for table in tables]
    with torch.no_grad():
        hidden = uneven(0)[0](rows.select("tokens", "attention_mask"))["hidden"]
        value = loss.value_network.module(hidden).squeeze(-1).double().numpy()
    return oreo_losses(numpy_rows(rows), value, *log_probs, beta=loss.beta, logits=logits[0], **options)


VARIANTS = ["plain", "train-mask", "spoken", "all-terminated"]
OPTIONS = [
    {},
    {"beta": 2.0},
    {"level": "utterance"},
    {"level": "utterance", "end_of_action": 1},
    {"level": "row"},
    {"level": "utterance", "logits_chunk": 3, "transition_weight": 0.3},
    {"transition_weight": 0.3, "actor_normalizer": "action"},
]


@pytest.mark.parametrize(("options", "variant"), [*zip(OPTIONS * 2, cycle(VARIANTS), strict=False)], ids=str)
def test_outputs_and_slopes_match_plain_loops(options, variant):
    rows, loss = sample_rows(variant), make(variant == "spoken", **options)
    plain = of_oracle(options)
    if variant == "spoken":
        plain["end_of_action"] = 1
    expected, slope = expected_of(loss, rows, variant, **plain)
    out = loss(rows)
    assert expected.keys() == set(out.keys())
    assert_matches(out, expected, rtol=2e-4, atol=1e-6)
    # The policy's gradient is that of its tokens' log-probabilities with these slopes.
    out["loss_actor"].backward()
    trained = {name: p for name, p in loss.actor_network.named_parameters() if p.grad is not None}
    found = {name: p.grad.clone() for name, p in trained.items()}
    loss.zero_grad()
    log_prob = row_log_prob(loss.actor_network, rows)
    (torch.from_numpy(slope).float()[:, :-1] * log_prob[:, 1:]).sum().backward()
    assert_same(found, {name: p.grad for name, p in trained.items()}, rtol=1e-3, atol=1e-5)


def spoken_row(*utterances):
    """One row: a token of the environment, then the utterances, with a token of the environment after each."""
    tokens, agent = [4], [0]
    for utterance in utterances:
        tokens, agent = [*tokens, *utterance, 4], [*agent, *[1] * len(utterance), 0]
    return by_hand([tokens], [agent])


UNWRITABLE = [
    ([5, 3, 1], "Row 0 has the token 3 at position 5, which the policy cannot write: it is forbidden"),
    ([5, 6, 5, 1], "Row 0 has the token 5 at position 6, which the policy cannot write: .*action_length=3 tokens"),
]


@pytest.mark.parametrize(("utterance", "message"), UNWRITABLE)
def test_actions_that_the_policy_cannot_write_are_refused(utterance, message):
    """In every call: policy and reference would both be -inf there, and their difference NaN."""
    actor = UtteranceActor(uneven(0), CONTROL, 3)
    loss = OREOLoss(actor, make_heads()[1], frozen_copy(actor))
    good, bad = spoken_row([5, 1], [5, 6, 1]), spoken_row([5, 1], utterance)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            loss(bad)
        assert all(value.isfinite() for value in loss(good).values())
    masked = bad.set("train_mask", torch.arange(bad["tokens"].shape[1])[None] < 4)
    assert total(loss(masked)).isfinite()


# -- wrong options -----------------------------------------------------------------------------------------------------


def test_parts_that_do_not_fit():
    value = make_heads()[1]
    with pytest.raises(TypeError, match=r"needs reference as a FrozenActor"):
        OREOLoss(make_actor(), value, make_actor())
    with pytest.raises(ValueError, match="Policy and reference must be the same kind of actor"):
        OREOLoss(make_actor(), value, frozen_copy(UtteranceActor(make_actor(), CONTROL, 4)))
    spoken = UtteranceActor(make_actor(), CONTROL, 4)
    free = UtteranceActor(make_actor(), ControlTokens(pad=0, end_of_action=1), 4)
    with pytest.raises(ValueError, match="forbidden tokens"):
        OREOLoss(spoken, value, frozen_copy(free))
    filtered = UtteranceActor(make_actor(), CONTROL, 4, top_k=3)
    with pytest.raises(ValueError, match="OREOLoss needs actors without top_k"):
        OREOLoss(filtered, value, frozen_copy(spoken))
    with pytest.raises(TypeError, match=r"OREOLoss needs value_network as a module .* got type"):
        OREOLoss(make_actor(), ValueHead, frozen_copy(make_actor()))
