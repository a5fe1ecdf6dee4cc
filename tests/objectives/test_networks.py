"""Any module is a value head of a loss, and target networks compute without dropout."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from tests.objectives import models
from tests.objectives.models import VOCAB, WIDTH, make_actor, make_cql, make_rows, make_utterance_ilql, moved, total
from torchrl_lang.modules import QValueHead, UtteranceQValueHead, ValueHead
from torchrl_lang.objectives import BCQLoss, CHAILoss, CQLLoss, ILQLLoss, OREOLoss, PPOLoss, PsiLoss, UtteranceILQLLoss
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


# name: (constructor, entry of Q's values)
LOSSES = {
    "ilql": (lambda *heads: ILQLLoss(*heads, target="lambda", margin_weight=0.3), "action_value"),
    "cql": (lambda actor, q, v: CQLLoss(actor, q), "action_value"),
    "bcq": (lambda actor, q, v: BCQLoss(actor, q), "action_value"),
    "psi": (lambda actor, q, v: PsiLoss(actor, q), "action_value"),
    "utterance": (UtteranceILQLLoss, "utterance_value"),
    "chai": (lambda actor, q, v: CHAILoss(q), "utterance_value"),
    "oreo": (lambda actor, q, v: OREOLoss(actor, v, frozen_copy(make_actor(seed=5))), None),
    "ppo": (lambda actor, q, v: PPOLoss(actor, v), None),
}


def own_heads(entry):
    """Heads of the library, Q's with a single head, far from zero."""
    q = UtteranceQValueHead(WIDTH, n_heads=1) if entry == "utterance_value" else QValueHead(WIDTH, VOCAB, n_heads=1)
    return moved(q, 1), moved(ValueHead(WIDTH), 2)


def plain(head, *after):
    """The network of a head as plain layers, which write no axis of heads."""
    first, last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, head.out_weight.shape[1])
    for layer, name in ((first, "in"), (last, "out")):
        layer.weight.data = getattr(head, f"{name}_weight").data[0].clone()
        layer.bias.data = getattr(head, f"{name}_bias").data[0].clone()
    return nn.Sequential(first, nn.ReLU(), last, *after)


def raw_heads(entry):
    q, v = own_heads(entry)
    return plain(q, *([nn.Flatten(0)] if entry == "utterance_value" else [])), plain(v, nn.Flatten(0))


def named_heads(entry, *more):
    """Heads that write other entries, as :func:`raw_heads` would, and more of them."""

    def module(head, key):
        return TensorDictModule(head, in_keys=["hidden"], out_keys=[key])

    q, v = raw_heads(entry)
    extra = [module(nn.Identity(), key) for key in more]
    return TensorDictSequential(module(q, "q"), *extra), TensorDictSequential(module(v, ("nested", "v")), *extra)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_raw_modules_without_an_axis_of_heads_and_entries_that_set_keys_names(name):
    """The losses and the gradients of the language model are those with the library's heads."""
    (build, entry), rows = LOSSES[name], models.rows_for(name)
    keys = {"state_value": ("nested", "v"), **({} if entry is None else {entry: "q"})}
    expected = build(make_actor(), *own_heads(entry))
    out = expected(rows)
    total(out).backward()
    for heads, names in ((raw_heads, {}), (named_heads, keys), (lambda entry: named_heads(entry, "more"), keys)):
        loss = build(make_actor(), *heads(entry))
        loss.set_keys(**names)
        found = loss(rows)
        for key, value in found.items():
            torch.testing.assert_close(value, out[key], equal_nan=True)
        total(found).backward()
        for (key, one), (_, other) in zip(loss.named_parameters(), expected.named_parameters(), strict=False):
            if key.startswith("actor_network."):
                torch.testing.assert_close(one.grad, other.grad, msg=key)
        trained = [weight.grad for key, weight in loss.named_parameters() if "value_network" in key]
        assert any(gradient is not None and gradient.any() for gradient in trained)


class Compared(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) > 0


WRONG = {
    "width": (nn.Linear(WIDTH + 1, VOCAB), nn.Linear(WIDTH + 1, 1), r"fails on states of this model, hidden \[3, 16\]"),
    "too few": (nn.Linear(WIDTH, VOCAB - 2), None, "values for 10 tokens"),
    "too many": (nn.Linear(WIDTH, VOCAB + 1), None, "values for 13 tokens"),
    "one value": (nn.Linear(WIDTH, 1), None, "values for 1 tokens"),
    "many values": (None, nn.Linear(WIDTH, 5), r"\[N, 1\] or \[N\], got \[3, 5\]"),
    "no module": (torch.sin, None, "needs qvalue_network as a module"),
    "no states": (nn.Flatten(0), None, "fails on states of this model"),
    "truth values": (Compared(WIDTH, VOCAB), None, "must write floats .*torch.bool"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_head_that_does_not_fit_is_refused_at_once(name):
    q, v, message = WRONG[name]
    own = own_heads("action_value")
    with pytest.raises((TypeError, ValueError), match=message):
        ILQLLoss(make_actor(), own[0] if q is None else q, own[1] if v is None else v)
    for build in ("oreo", "ppo") if q is None else ("psi",):
        with pytest.raises((TypeError, ValueError), match=message):
            LOSSES[build][0](make_actor(), q, v)


def test_a_value_trunk_is_no_bare_model():
    q, v = own_heads("action_value")
    for kind, heads in ((ILQLLoss, (q, v)), (PPOLoss, (v,))):
        with pytest.raises(TypeError, match=r"value_trunk as a Trunk, got a Linear: wrap it, Trunk\(model\)"):
            kind(make_actor(), *heads, value_trunk=nn.Linear(WIDTH, WIDTH))


def test_a_trial_leaves_no_trace():
    """Neither the stream of random numbers, nor the mode, nor running means; a lazy layer gets its width."""
    head = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, VOCAB))
    frozen = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, VOCAB))
    actor, state = make_actor(), torch.get_rng_state()
    loss = CQLLoss(actor, frozen)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in frozen.modules())
    assert int(loss.qvalue_network_params["module", "2", "num_batches_tracked"]) == 0
    assert all(value.isfinite().all() for value in models.losses_of(CQLLoss(actor, head)(make_rows())).values())


def test_a_function_that_calls_a_module():
    """Its weights would not be found, and the targets would be the online values."""
    net = nn.Linear(WIDTH, VOCAB)
    head = TensorDictModule(lambda hidden: net(hidden), in_keys=["hidden"], out_keys=["action_value"])
    with pytest.raises(ValueError, match=r"has no parameters.*the module that holds them"):
        CQLLoss(make_actor(), head)


# -- targets -----------------------------------------------------------------------------------------------------------


def with_dropout(module, rate):
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = rate
    return module


def own_trunk():
    """A trunk of the values that applies dropout; the policy's does not."""
    return {"value_trunk": with_dropout(make_actor(seed=3)[0], 0.5), "target_trunk": True, "detach_qvalue": True}


def head_alone(kind, width):
    """A loss of a head that applies dropout."""
    return kind(make_actor(), nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, width)), models.make_heads()[1])


MAKE = {
    "trunk of ilql": lambda: models.make_ilql(**own_trunk()),
    "trunk of psi": lambda: models.make_psi(**own_trunk()),
    "head of ilql": lambda: head_alone(ILQLLoss, VOCAB),
    "head of utterances": lambda: head_alone(UtteranceILQLLoss, 1),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_target_is_the_same_in_every_pass(name):
    torch.manual_seed(0)
    loss, rows, of_target = MAKE[name]().train(), make_rows(), "td_target" if "psi" in name else "target_qvalue"
    with_dropout(loss.actor_network, 0.0)  # GPT-2 has dropout of its own
    first, second = loss(rows), loss(rows)
    torch.testing.assert_close(second[of_target], first[of_target])
    assert second["qvalue"] != first["qvalue"]
    assert all(module.training for module in loss.modules())


SHARED = {
    "utterance-ilql": make_utterance_ilql,
    "cql": make_cql,
    "bcq, trunks of its own": lambda: models.make_bcq(value_trunk=make_actor(seed=3)[0], target_trunk=True),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("rate", "training", "more"), [(0.0, True, 0), (0.5, False, 0), (0.5, True, 1)])
def test_without_dropout_no_trunk_runs_a_second_time(name, rate, training, more, passes):
    loss = with_dropout(SHARED[name]().train(training), rate)
    trunks = 1 + (getattr(loss, "value_trunk", None) is not None)
    assert len(passes(loss)) == trunks * (1 + more) + getattr(loss, "has_target_trunk", False)
