"""Any module is a value head of a loss, and target networks compute without dropout."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from tests.objectives.chai_rows import CONTROL, chai_rows
from tests.objectives.conftest import (
    VOCAB,
    WIDTH,
    losses_of,
    make_actor,
    make_heads,
    make_ilql,
    make_qbackup,
    make_rows,
    total,
)
from tests.objectives.utterances import make_utterance_ilql, moved
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    UtteranceQValueHead,
    ValueGuidance,
    ValueHead,
    qvalue_module,
)
from torchrl_lang.objectives import BCQLoss, CHAILoss, CQLLoss, ILQLLoss, OREOLoss, PPOLoss, PsiLoss, UtteranceILQLLoss
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def oreo(actor, q, v, **options):
    return OREOLoss(actor, v, frozen_copy(make_actor(seed=5)), **options)


def ppo(actor, q, v, **options):
    return PPOLoss(actor, v, **options)


def acted():
    """Rows as PPO reads them; the numbers need not be those of a policy."""
    rows, g = make_rows(), torch.Generator().manual_seed(1)
    for name in ("token_log_prob", "advantage", "value_target"):
        rows[name] = torch.randn(rows["tokens"].shape, generator=g)
    return rows


# name: (constructor, rows, entry of Q's values)
LOSSES = {
    "ilql": (ILQLLoss, make_rows, "action_value"),
    "ilql-all": (lambda *heads: ILQLLoss(*heads, target="lambda", margin_weight=0.3), make_rows, "action_value"),
    "cql": (lambda actor, q, v: CQLLoss(actor, q), make_rows, "action_value"),
    "bcq": (lambda actor, q, v: BCQLoss(actor, q), make_rows, "action_value"),
    "psi": (lambda actor, q, v: PsiLoss(actor, q), make_rows, "action_value"),
    "utterance": (UtteranceILQLLoss, make_rows, "utterance_value"),
    "chai": (lambda actor, q, v: CHAILoss(q), chai_rows, "utterance_value"),
    "oreo": (oreo, make_rows, None),
    "ppo": (ppo, acted, None),
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


def compare(build, rows, entry, heads, **keys):
    """The losses and the gradients of the language model are those with the library's heads."""
    expected, loss = build(make_actor(), *own_heads(entry)), build(make_actor(), *heads)
    loss.set_keys(**{name: key for name, key in keys.items() if name in loss.default_keys.__dataclass_fields__})
    out = expected(rows)
    for name, value in loss(rows).items():
        torch.testing.assert_close(value, out[name], equal_nan=True)
    total(out).backward()
    total(loss(rows)).backward()
    for (name, one), (_, other) in zip(loss.named_parameters(), expected.named_parameters(), strict=False):
        if name.startswith("actor_network."):
            torch.testing.assert_close(one.grad, other.grad, msg=name)
    trained = [weight.grad for name, weight in loss.named_parameters() if "value_network" in name]
    assert any(gradient is not None and gradient.any() for gradient in trained)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_raw_modules_without_an_axis_of_heads(name):
    build, rows, entry = LOSSES[name]
    compare(build, rows(), entry, raw_heads(entry))


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("extra", [[], ["more"]], ids=["one entry", "two entries"])
def test_entries_that_set_keys_names(name, extra):
    build, rows, entry = LOSSES[name]

    q, v = (
        TensorDictSequential(
            TensorDictModule(head, in_keys=["hidden"], out_keys=[key]),
            *(TensorDictModule(nn.Identity(), in_keys=["hidden"], out_keys=[one]) for one in extra),
        )
        for head, key in zip(raw_heads(entry), ("q", ("nested", "v")), strict=True)
    )
    keys = {} if entry is None else {entry: "q"}
    compare(build, rows(), entry, (q, v), **keys, state_value=("nested", "v"))


class Numbers(nn.Module):
    """The number of each token as its value, or of each state as many."""

    def __init__(self, number):
        super().__init__()
        self.numbers = nn.Parameter(number)

    def forward(self, hidden):
        return self.numbers.expand(*hidden.shape[:-1], *self.numbers.shape)


def test_values_by_hand():
    rows = TensorDict(
        tokens=torch.tensor([[4, 1, 2, 9]]),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        agent_mask=torch.tensor([[False, True, True, False]]),
        token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        terminated=torch.tensor([[True]]),
        batch_size=[1],
    )
    loss = ILQLLoss(make_actor(), Numbers(torch.arange(12.0)), Numbers(torch.tensor(2.0)), gamma=0.9, cql_weight=0.0)
    out = loss(rows)
    # Q(s, a) = a and V = 2: the targets are .9 * 2 and -1, the errors .8 and -3; V's are -1 and 0.
    torch.testing.assert_close(out["loss_qvalue"], torch.tensor((0.64 + 9.0) / 2))
    torch.testing.assert_close(out["loss_value"], torch.tensor(0.3 / 2))
    # CQL: the greatest value of the next state is 11.
    out = CQLLoss(make_actor(), Numbers(torch.arange(12.0)), gamma=0.9, cql_weight=0.0)(rows)
    torch.testing.assert_close(out["loss_qvalue"], torch.tensor((8.9**2 + 9.0) / 2))


def test_a_policy_reads_a_raw_head_that_was_trained():
    q, v = raw_heads("action_value")
    loss = ILQLLoss(make_actor(), TensorDictModule(q, in_keys=["hidden"], out_keys=["q"]), v)
    loss.set_keys(action_value="q")
    hidden = torch.randn(5, WIDTH)
    own = ValueGuidance(own_heads("action_value")[0], beta=4.0)
    for head in (loss.target_qvalue_network(), q):
        guidance = ValueGuidance(head, beta=4.0)
        torch.testing.assert_close(guidance(hidden), own(hidden))
        UtteranceActor(make_actor(), CONTROL, 4, guidance=guidance)


class Compared(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, VOCAB)

    def forward(self, hidden):
        return super().forward(hidden) > 0


WRONG = {
    "width": (nn.Linear(WIDTH + 1, VOCAB), nn.Linear(WIDTH + 1, 1), r"fails on states of this model, hidden \[3, 16\]"),
    "too few": (nn.Linear(WIDTH, VOCAB - 2), None, "values for 10 tokens"),
    "too many": (nn.Linear(WIDTH, VOCAB + 1), None, "values for 13 tokens"),
    "one value": (nn.Linear(WIDTH, 1), None, "values for 1 tokens"),
    "many values": (None, nn.Linear(WIDTH, 5), r"must write \[N, 1\] or \[N\], got \[3, 5\] for N = 3 states"),
    "no module": (torch.sin, None, "needs qvalue_network as a module"),
    "no states": (nn.Flatten(0), None, r"it must give \[N, n_q, V\] or \[N, V\]"),
    "truth values": (Compared(), None, "must write floating-point numbers, got torch.bool"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_head_that_does_not_fit_is_refused_at_once(name):
    q, v, message = WRONG[name]
    own = own_heads("action_value")
    with pytest.raises((TypeError, ValueError), match=message):
        ILQLLoss(make_actor(), own[0] if q is None else q, own[1] if v is None else v)
    for build in (oreo, ppo) if v is not None else ():
        with pytest.raises(ValueError, match=message):
            build(make_actor(), None, v)
    if q is not None:
        with pytest.raises((TypeError, ValueError), match=message):
            PsiLoss(make_actor(), q)


def test_what_a_loss_cannot_know_is_looked_at_in_the_first_call():
    loss = CHAILoss(nn.Linear(WIDTH + 1, 1))
    with pytest.raises(ValueError, match=r"qvalue_network of CHAILoss fails on .*, hidden \[\d+, 16\]"):
        loss(chai_rows())
    trunk = TensorDictSequential(make_actor()[0])
    for head, message in ((nn.Linear(WIDTH + 1, VOCAB), "fails on states"), (nn.Linear(WIDTH, 10), "for 10 tokens")):
        loss = CQLLoss(make_actor(), head, value_trunk=trunk)
        with pytest.raises(ValueError, match=message):
            loss(make_rows())
    two = TensorDictSequential(
        *(TensorDictModule(nn.Linear(WIDTH, VOCAB), in_keys=["hidden"], out_keys=[key]) for key in ("q", "p"))
    )
    loss = CQLLoss(make_actor(), two)
    with pytest.raises(ValueError, match=r"reads 'action_value' of its qvalue_network, which writes \['q', 'p'\]"):
        loss(make_rows())


def test_a_trial_leaves_no_trace():
    """Neither the stream of random numbers, nor the mode, nor running means; a lazy layer gets its width."""
    head = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, VOCAB))
    frozen = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, VOCAB))
    actor, state = make_actor(), torch.get_rng_state()
    loss = CQLLoss(actor, frozen)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in frozen.modules())
    assert int(loss.qvalue_network_params["module", "2", "num_batches_tracked"]) == 0
    assert all(value.isfinite().all() for value in losses_of(CQLLoss(actor, head)(make_rows())).values())


def test_a_function_that_calls_a_module():
    """Its weights would not be found, and the targets would be the online values."""
    net = nn.Linear(WIDTH, VOCAB)
    head = TensorDictModule(lambda hidden: net(hidden), in_keys=["hidden"], out_keys=["action_value"])
    with pytest.raises(ValueError, match=r"has no parameters.*the module that holds them"):
        CQLLoss(make_actor(), head)


def test_a_head_of_another_dtype_than_the_states():
    with pytest.raises(ValueError, match=r"fails on states of this model, hidden \[3, 16\] of torch.bfloat16"):
        ILQLLoss(make_actor().bfloat16(), nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 1))


# -- targets ----------------------------------------------------------------------------------------------------------

OWN = {"target_trunk": True, "detach_qvalue": True}


def own_trunk():
    """A trunk of the values that applies dropout; the policy's does not."""
    trunk = make_actor(seed=3)[0]
    for module in trunk.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return trunk


def noisy(head):
    head = qvalue_module(head)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return head


def head_alone():
    head = noisy(QValueHead(WIDTH, VOCAB, kind="residual", dropout=0.5))
    return ILQLLoss(make_actor(expose_pre_norm=True), head, make_heads()[1])


def head_of_utterances():
    head = noisy(UtteranceQValueHead(WIDTH, kind="residual", dropout=0.5))
    return UtteranceILQLLoss(make_actor(expose_pre_norm=True), head, make_heads()[1])


MAKE = {
    "trunk of ilql": (lambda: make_ilql(value_trunk=own_trunk(), **OWN), "target_qvalue", "qvalue"),
    "trunk of psi": (lambda: make_qbackup(PsiLoss, value_trunk=own_trunk(), **OWN), "td_target", "qvalue"),
    "head of ilql": (head_alone, "target_qvalue", "qvalue"),
    "head of utterances": (head_of_utterances, "target_qvalue", "qvalue"),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_target_is_the_same_in_every_pass(name):
    make, of_target, online = MAKE[name]
    torch.manual_seed(0)
    loss, rows = make().train(), make_rows()
    for module in loss.actor_network.modules():  # GPT-2 has dropout of its own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first, second = loss(rows), loss(rows)
    torch.testing.assert_close(second[of_target], first[of_target])
    assert second[online] != first[online]
    assert all(module.training for module in loss.modules())


SHARED = {
    "ilql": (make_ilql, "target_qvalue"),
    "utterance-ilql": (lambda **options: make_utterance_ilql(make_actor(), **options), "target_qvalue"),
    "cql": (lambda **options: make_qbackup(CQLLoss, **options), "td_target"),
    "bcq": (lambda **options: make_qbackup(BCQLoss, **options), "td_target"),
    "psi": (lambda **options: make_qbackup(PsiLoss, **options), "td_target"),
    "bcq, trunks of its own": (
        lambda **options: make_qbackup(BCQLoss, value_trunk=make_actor(seed=3)[0], target_trunk=True, **options),
        "td_target",
    ),
}


def set_dropout(loss, rate):
    for module in loss.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("rate", "training", "passes"), [(0.0, True, 0), (0.5, False, 0), (0.5, True, 1)])
def test_without_dropout_no_trunk_runs_a_second_time(name, rate, training, passes):
    loss, rows = SHARED[name][0]().train(training), make_rows()
    set_dropout(loss, rate)
    trunks = {id(trunk): trunk for trunk in (loss.actor_network[0], getattr(loss, "value_trunk", None)) if trunk}
    seen = []
    hooks = [trunk.register_forward_pre_hook(lambda *_: seen.append(1)) for trunk in trunks.values()]
    loss(rows)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(trunks) * (1 + passes) + getattr(loss, "has_target_trunk", False)
