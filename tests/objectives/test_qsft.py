"""Q-SFT: plain loops, numbers by hand, what the backup reads, passes of the trunk, what it shares with imitation."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule

from tests.objectives.models import by_hand, make_actor, make_rows, vary
from tests.objectives.oracle import assert_matches, numpy_rows, qsft_losses
from tests.objectives.test_ilql import of_oracle
from torchrl_lang.modules import UtteranceActor
from torchrl_lang.objectives import QSFTLoss
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


def half_paid():
    rows = make_rows(seed=3)
    return rows.set("token_reward", 0.5 * rows["token_reward"])


VARIANTS = ["plain", "train-mask", "utterances", "all-terminated"]
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


@pytest.mark.parametrize(("options", "variant"), [*zip(OPTIONS * 2, cycle(VARIANTS), strict=False)], ids=str)
def test_outputs_match_plain_loops(options, variant):
    rows = vary(half_paid(), variant)
    plain = {"value_min": -9.0, "value_max": 9.0} | of_oracle(options)
    length = 2 if variant == "utterances" else None
    if length is not None:
        plain |= {"end_of_action": 1, "forbidden": (0, 3), "action_length": length}
    out, tables = make(length, **options)(rows), [logits_of(uneven(seed), rows) for seed in (0, 1, 2)]
    assert_matches(out, qsft_losses(numpy_rows(rows), *tables, **plain), rtol=2e-4, atol=1e-6)


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


@pytest.mark.parametrize("form", [tied, untied, without_head])
def test_the_target_of_any_actor(form):
    """The target's own trunk and head, and afterwards the model's own weights."""
    rows, options = half_paid(), {"value_min": -9.0, "value_max": 9.0}
    actor, other, reference = (of_form(form, seed) for seed in (0, 1, 2))
    loss = lend_other(QSFTLoss(actor, frozen_copy(reference), logits_chunk=2, **options), other)
    before = {name: weight.clone() for name, weight in actor.named_parameters()}
    out = loss(rows)
    tables = [logits_of(one, rows) for one in (actor, other, reference)]
    assert_matches(out, qsft_losses(numpy_rows(rows), *tables, **options), rtol=2e-4, atol=1e-6)
    after = dict(actor.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def two_tokens(rewards=(0.25, 0.5)):
    """Two decisions with the tokens 1 and 2."""
    return by_hand([[4, 1, 2]], [[0, 1, 1]], [[0.0, *rewards]])


# -- wrong options and wrong rows --------------------------------------------------------------------------------------


def test_returns_outside_their_interval_are_named():
    rows = two_tokens((0.25, 1.0))
    actor = make_actor()
    loss = QSFTLoss(actor, frozen_copy(actor), gamma=1.0)
    loss(two_tokens((0.0, 1.0)))
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
        make(rest=2)(two_tokens())
    assert make(rest=4)(two_tokens())["loss_qvalue"].isfinite()  # the environment's
