"""Q-SFT: plain loops, numbers by hand, what the backup reads, passes of the trunk, what it shares with imitation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torchrl.objectives import SoftUpdate
from transformers import GPT2Model

from tests.objectives.conftest import VOCAB, make_actor, make_qsft, make_rows
from tests.objectives.oracle_likelihoods import qsft_losses
from torchrl_lang.functional.value_terms import likelihood_ratio_value, weighted_cross_entropy
from torchrl_lang.modules import UtteranceActor
from torchrl_lang.objectives import BCLoss, QSFTLoss, qsft
from torchrl_lang.objectives.networks import lent
from torchrl_lang.schema import ControlTokens
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=(3,))


def uneven(seed):
    """An actor whose probabilities differ by factors, not by percents."""
    actor = make_actor(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in actor.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.25)
    return actor


def make(action_length=None, **options):
    """A loss over three different models: the trained one, its target and the reference."""
    actor = uneven(0)
    written = actor if action_length is None else UtteranceActor(actor, CONTROL, action_length)
    loss = QSFTLoss(written, frozen_copy(uneven(2)), **{"value_min": -9.0, "value_max": 9.0, **options})
    return lend_other(loss, uneven(1))


def logits_of(actor, rows):
    with torch.no_grad():
        return actor(rows.select("tokens", "attention_mask"))["logits"].double().numpy()


def numpy_rows(rows):
    return {key: value.numpy() for key, value in rows.items()}


OPTIONS = [
    {},
    {"gamma": 0.5, "turn_gamma": 0.9},
    {"turn_gamma": 0.5, "end_of_action": 1},
    {"value_min": -20.0, "value_max": 5.0},
    {"threshold": 0.3},
    {"threshold": 1.0},
    {"rest": 0},
    {"rest": 0, "threshold": 0.1, "logits_chunk": 2},
    {"transition_weight": 0.3, "actor_normalizer": "action"},
    {"transition_weight": 0.3, "logits_chunk": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", ["plain", "train-mask", "utterances", "all-terminated"])
def test_outputs_match_plain_loops(options, variant):
    rows = make_rows(seed=3)
    rows["token_reward"] *= 0.5
    if variant == "all-terminated":
        rows["terminated"][:] = True
    if variant == "train-mask":
        rows["train_mask"] = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(1)) < 0.6
    length = 2 if variant == "utterances" else None
    out = make(length, **options)(rows)
    plain = {"value_min": -9.0, "value_max": 9.0, **options}
    plain.pop("logits_chunk", None)
    plain["normalizer"] = plain.pop("actor_normalizer", "all")
    if length is not None:
        plain |= {"end_of_action": 1, "forbidden": (0, 3), "action_length": length}
    tables = [logits_of(uneven(seed), rows) for seed in (0, 1, 2)]
    expected = qsft_losses(numpy_rows(rows), *tables, **plain)
    for name, value in expected.items():
        np.testing.assert_allclose(out[name].item(), value, rtol=2e-4, atol=1e-6, err_msg=name)


class Layers(torch.nn.Module):
    """A trunk and its head as one module, tokens -> logits."""

    def __init__(self, trunk, head):
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, tokens, attention_mask):
        return self.head(self.trunk(tokens, attention_mask))


def tied(actor):
    assert actor[1].module.weight is actor[0].module.model.get_input_embeddings().weight
    return actor


def untied(actor):
    actor[1].module.weight = torch.nn.Parameter(actor[1].module.weight.flip(0))
    return actor


def two_modules(actor):
    wide = TensorDictModule(torch.nn.Linear(16, 8), in_keys=["hidden"], out_keys=["wide"])
    head = TensorDictModule(torch.nn.Linear(8, VOCAB), in_keys=["wide"], out_keys=["logits"])
    return ProbabilisticTensorDictSequential(actor[0], wide, head, actor[-1])


def without_head(actor):
    whole = Layers(actor[0].module, actor[1].module)
    keys = {"in_keys": ["tokens", "attention_mask"], "out_keys": ["logits"]}
    return ProbabilisticTensorDictSequential(TensorDictModule(whole, **keys), actor[-1])


def of_form(form, seed):
    torch.manual_seed(seed)
    return form(uneven(seed))


def lend_other(loss, other):
    """Let a loss have another actor as its target."""
    weights = TensorDict.from_module(other)
    for name, weight in loss.target_actor_network_params.items(True, True):
        weight.data.copy_(weights.get(name))
    return loss


@pytest.mark.parametrize("form", [tied, untied, two_modules, without_head])
def test_the_target_of_any_actor(form, monkeypatch):
    """The target's own trunk and head; the whole model gets its weights once, however many chunks there are."""
    rows, options = make_rows(seed=3), {"value_min": -9.0, "value_max": 9.0}
    rows["token_reward"] *= 0.5
    actor, other, reference = (of_form(form, seed) for seed in (0, 1, 2))
    loss = lend_other(QSFTLoss(actor, frozen_copy(reference), logits_chunk=2, **options), other)
    calls = []
    monkeypatch.setattr(qsft, "lent", lambda params, module: calls.append(module) or lent(params, module))
    before = {name: weight.clone() for name, weight in actor.named_parameters()}
    out = loss(rows)
    tables = [logits_of(one, rows) for one in (actor, other, reference)]
    for name, value in qsft_losses(numpy_rows(rows), *tables, normalizer="all", **options).items():
        np.testing.assert_allclose(out[name].item(), value, rtol=2e-4, atol=1e-6, err_msg=name)
    assert sum(module is actor for module in calls) == 1
    assert len(calls) == 1 if form is without_head else len(calls) > 3
    after = dict(actor.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_the_target_applies_no_dropout():
    """As the reference does not: the maximum of a noisy ratio is too large."""
    rows, actor = make_rows(seed=3), uneven(0)
    for module in actor.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    loss = QSFTLoss(actor, frozen_copy(uneven(2)), value_min=-9.0, value_max=9.0, threshold=1.0).train()
    first, second = loss(rows), loss(rows)
    assert first["td_target"] == second["td_target"]
    assert first["likelihood"] != second["likelihood"]
    assert all(module.training for module in actor.modules())
    assert loss.eval()(rows)["td_target"] == first["td_target"]


# -- by hand -----------------------------------------------------------------------------------------------------------

CROSS_ENTROPY = [  # p = (1/2, 1/4, 1/8, 1/8), in units of log 2: 1, 2, 3, 3
    (1.0, None, 1.0),
    (0.0, None, 8 / 3),
    (0.4, None, 0.4 * 1 + 0.6 * 8 / 3),
    (0.4, 3, 0.4 * 1 + 0.6 * 3),
    (0.0, 1, 2.0),
]


@pytest.mark.parametrize(("weight", "rest", "expected"), CROSS_ENTROPY)
def test_weighted_cross_entropy_by_hand(weight, rest, expected):
    log_prob = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    found = weighted_cross_entropy(log_prob, torch.tensor([0]), torch.tensor([weight]), rest)
    assert found.item() == pytest.approx(expected * math.log(2), rel=1e-6)


def two_tokens(*, terminated, rewards=(0.25, 0.5)):
    """Two decisions with the tokens 1 and 2."""
    return TensorDict(
        tokens=torch.tensor([[4, 1, 2]]),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        agent_mask=torch.tensor([[False, True, True]]),
        token_reward=torch.tensor([[0.0, *rewards]]),
        terminated=torch.tensor([[terminated]]),
        batch_size=[1],
    )


BACKUPS = [
    # A target model like the reference has the ratio 1 everywhere, the value value_max: y, in units of the rewards.
    ({"gamma": 0.5}, True, [0.25 + 0.5, 0.5]),
    ({"gamma": 0.5}, False, [0.25 + 0.5, 0.5 + 0.5]),
    ({"gamma": 0.0}, False, [0.25, 0.5]),
    ({"gamma": 1.0, "turn_gamma": 0.5}, True, [1.0, 0.5]),  # .25 + 1 is clipped; a single utterance
    ({"gamma": 0.5, "value_max": 3.0}, False, [0.25 + 1.5, 0.5 + 1.5]),
    ({"gamma": 0.5, "value_min": -1.0, "value_max": 0.75}, True, [0.25 + 0.375, 0.5]),
]


@pytest.mark.parametrize(("options", "terminated", "expected"), BACKUPS)
def test_targets_by_hand(options, terminated, expected):
    actor = uneven(0)
    loss = QSFTLoss(actor, frozen_copy(actor), reduction="none", rest=0, **options)
    out = loss(two_tokens(terminated=terminated))
    assert out["td_target"].item() == pytest.approx(sum(expected) / 2, rel=1e-5)
    low, high = options.get("value_min", 0.0), options.get("value_max", 1.0)
    log_prob = torch.from_numpy(logits_of(actor, two_tokens(terminated=True))).log_softmax(-1)[0]
    for place, (action, y) in enumerate(zip((1, 2), expected, strict=True)):
        w = (y - low) / (high - low)
        term = -(w * log_prob[place, action] + (1 - w) * log_prob[place, 0])
        assert out["loss_qvalue"][0, place].item() == pytest.approx(term.item(), rel=1e-4)


# -- what it has in common with its relatives, and what not ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rest": 0}], ids=str)
def test_with_all_values_at_their_maximum_it_is_behaviour_cloning(options):
    """Episodes that all end with the greatest return, and a target that has not left the reference."""
    rows = make_rows(seed=4)
    rows["terminated"][:] = True
    last = rows["agent_mask"] & (rows["agent_mask"].flip(-1).cumsum(-1).flip(-1) == 1)
    rows["token_reward"] = last.float()
    actor = uneven(0)
    found = QSFTLoss(actor, frozen_copy(actor), gamma=1.0, **options)(rows)
    torch.testing.assert_close(found["loss_qvalue"], BCLoss(actor, actor_normalizer="action")(rows)["loss_actor"])
    rows["token_reward"] *= 0.5
    less = QSFTLoss(actor, frozen_copy(actor), gamma=1.0, **options)(rows)
    assert abs(less["loss_qvalue"] - found["loss_qvalue"]) > 0.01


def test_what_the_backup_reads():
    """A token that hardly occurs: its ratio is the value without a threshold, and of no account with one."""
    behavior = torch.tensor([[0.6, 0.399, 0.001]]).log()
    target = torch.tensor([[0.3, 0.1, 0.6]]).log()
    assert likelihood_ratio_value(target, behavior).item() == pytest.approx(600, rel=1e-3)
    assert likelihood_ratio_value(target, behavior, 0.1).item() == pytest.approx(0.5)
    impossible = behavior.masked_fill(torch.tensor([[True, False, True]]), -math.inf)
    assert likelihood_ratio_value(target, impossible).item() == pytest.approx(0.1 / 0.399, rel=1e-5)


@pytest.mark.parametrize("terminated", [True, False])
def test_truncated_is_not_terminated(terminated):
    rows = make_rows(seed=3)
    rows["terminated"][:] = terminated
    found = make(gamma=1.0, threshold=0.9)(rows)["td_target"]
    last = rows["attention_mask"].sum(-1) - 1
    moved = rows.clone()  # a row's last token: a decision's state only where the agent wrote nothing after it
    moved["tokens"][torch.arange(6), last] = torch.where(
        rows["agent_mask"][torch.arange(6), last], rows["tokens"][torch.arange(6), last], 7
    )
    changed = make(gamma=1.0, threshold=0.9)(moved)["td_target"]
    assert torch.equal(found, changed) if terminated else not torch.equal(found, changed)


# -- passes, gradients, parameters -------------------------------------------------------------------------------------


def test_three_passes_of_the_trunk_one_with_gradients(monkeypatch):
    """The model, its target and the reference."""
    calls, forward, loss = [], GPT2Model.forward, make_qsft(transition_weight=0.5)

    def count(*args, **options):
        calls.append(torch.is_grad_enabled())
        return forward(*args, **options)

    monkeypatch.setattr(GPT2Model, "forward", count)
    loss(make_rows())
    assert sorted(calls) == [False, False, True]


def test_only_the_model_is_trained():
    loss, rows = make(), make_rows()
    reference = {name: weight.clone() for name, weight in loss.reference.state().items()}
    target = loss.target_actor_network_params.clone()
    loss(rows)["loss_qvalue"].backward()
    assert all(name.startswith("actor_network.") for name, _ in loss.named_parameters())
    assert all(weight.grad is not None and weight.grad.any() for weight in loss.actor_network[0].module.parameters())
    torch.optim.SGD(loss.parameters(), 0.1).step()
    assert all(torch.equal(reference[name], weight) for name, weight in loss.reference.state().items())
    assert (target == loss.target_actor_network_params).all()


def test_the_target_follows_the_model():
    loss = make()
    updater, target = SoftUpdate(loss, tau=0.25), loss.target_actor_network_params
    before = target.clone()
    source = loss.actor_network_params
    for name in before.keys(True, True):
        torch.testing.assert_close(before.get(name), source.get(name).data)  # it begins as a copy
    with torch.no_grad():
        for weight in loss.parameters():
            weight.add_(1.0)
    loss(make_rows())
    updater.step()
    assert not any(weight.requires_grad for weight in target.values(True, True))
    for name in before.keys(True, True):
        torch.testing.assert_close(target.get(name), before.get(name) + 0.25)
    assert any(name.startswith("target_actor_network_params") for name in loss.state_dict())


# -- wrong options and wrong rows --------------------------------------------------------------------------------------


def test_returns_outside_their_interval_are_named():
    rows = two_tokens(terminated=True, rewards=(0.25, 1.0))
    actor = make_actor()
    loss = QSFTLoss(actor, frozen_copy(actor), gamma=1.0)
    loss(two_tokens(terminated=True, rewards=(0.0, 1.0)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Row 0 has a return to go outside \[0.0, 1.0\] at position 1.*value_max"):
            loss(rows)
    QSFTLoss(actor, frozen_copy(actor), gamma=0.5)(rows)  # .25 + .5
    rows["terminated"][:] = False  # what follows may repair it
    QSFTLoss(actor, frozen_copy(actor), gamma=1.0)(rows)
    rows["terminated"][:] = True
    rows["train_mask"] = torch.tensor([[False, False, True]])
    QSFTLoss(actor, frozen_copy(actor), gamma=1.0)(rows)  # what is not trained on may have any return


def test_a_rest_that_the_agent_writes_is_an_error():
    with pytest.raises(ValueError, match="Row 0 has the token rest=2 at position 2, written by the agent"):
        make(rest=2)(two_tokens(terminated=True))
    assert make(rest=4)(two_tokens(terminated=True))["loss_qvalue"].isfinite()  # the environment's
