"""What every loss of the library must do."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from tensordict import LazyStackedTensorDict, assert_allclose_td
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator
from transformers import GPT2Model

from tests.modules.toys import without_blocks
from tests.objectives import models
from torchrl_lang.modules import UtteranceActor
from torchrl_lang.objectives import ArCHerLoss, BCQLoss, CHAILoss, OREOLoss, PPOLoss, QSFTLoss, UtteranceILQLLoss, base
from torchrl_lang.objectives.preference import PreferenceLoss
from torchrl_lang.objectives.values import QValueLoss
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


def gradients(loss, rows):
    loss.zero_grad()
    models.total(loss(rows)).backward()
    return {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left.keys():
        torch.testing.assert_close(
            left[name], right[name], equal_nan=True, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def by_key(loss, found):
    """Of a call with tensors, which gives one output as a tensor and several as a tuple: TorchRL's way."""
    return dict(zip(loss.out_keys, found if isinstance(found, tuple) else (found,), strict=True))


def test_out_keys_are_what_comes_out_and_the_input_stays(make_loss, rows):
    loss, before = make_loss(), rows.clone()
    out = loss(rows)
    assert set(rows.keys()) == set(before.keys())
    assert_allclose_td(rows, before, rtol=0, atol=0)
    assert set(out.keys()) == set(loss.out_keys)
    assert out.batch_size == torch.Size([])
    first, *_ = loss.out_keys
    loss.select_out_keys(first)
    assert_same(loss(rows), out.select(first))
    assert all(not value.requires_grad for key, value in out.items() if not key.startswith("loss_"))


def test_padding_changes_nothing(make_loss, rows):
    """Wider rows, anything at all on the padding, and no numbers where the agent wrote nothing."""
    loss, agent = make_loss(), nn.functional.pad(rows["agent_mask"], (0, 5))
    of_tokens = {key: value for key, value in rows.items() if value.shape == rows["tokens"].shape}
    wide = rows.clone().update({key: nn.functional.pad(value, (0, 5)) for key, value in of_tokens.items()})
    for key in of_tokens.keys() - {"token_reward"}:
        if wide[key].is_floating_point():
            wide[key] = torch.where(agent, wide[key], torch.nan)
    expected = loss(rows)
    for other in (9, -100, 9999):
        wide["tokens"] = torch.where(wide["attention_mask"], wide["tokens"], other)
        assert_same(loss(wide), expected, rtol=1e-5, atol=1e-6)


def test_a_sum_is_that_of_its_rows_and_a_mean_counts_decisions(make_loss, rows):
    """Fails where one row's padding counts in another row's company."""
    loss, none = make_loss(reduction="sum"), make_loss(reduction="none")(rows)
    parts, summed = [models.losses_of(loss(row[None])) for row in rows], models.losses_of(loss(rows))
    assert_same(summed, {key: sum(part[key] for part in parts) for key in summed}, rtol=1e-4, atol=1e-5)
    n = rows["agent_mask"][..., 1:].sum()
    if isinstance(loss, PreferenceLoss):  # it counts rows, or pairs of them
        n = rows["agent_mask"].any(-1).reshape(6, -1).all(-1).sum()
    chai = isinstance(loss, CHAILoss)  # its means are over utterances with candidates: test_chai.py
    imitates = not isinstance(loss, ArCHerLoss | CHAILoss | PPOLoss | PreferenceLoss)
    mean = make_loss(**({"actor_normalizer": "action"} if imitates else {}))(rows)
    for key, value in summed.items():
        assert none[key].shape == rows["tokens"].shape
        torch.testing.assert_close(none[key].sum(), value, rtol=1e-4, atol=1e-5)
        if not chai:
            by_utterance = isinstance(loss, ArCHerLoss | UtteranceILQLLoss) and key != "loss_actor"
            number = models.number_of_utterances(rows) if by_utterance else n
            torch.testing.assert_close(mean[key], value / number, rtol=1e-4, atol=1e-6)


def test_loss_mask_takes_rows_out(make_loss, rows):
    """Masked rows count for nothing, in terms, metrics, counts and gradients, whatever they hold."""
    kept = torch.tensor([True, True, False, True, False, True])
    masked = rows.clone().set(("collector", "mask"), models.whole_rows(kept, rows))
    for key, value in {"token_reward": 1e6, "token_log_prob": -1e4, "advantage": 1e6, "value_target": 1e6}.items():
        if key in masked.keys():
            masked[key][~kept] = torch.where(masked["agent_mask"][~kept], value, 0.0)
    for reduction in ("mean", "sum"):
        loss = make_loss(reduction=reduction)
        assert_same(loss(masked), loss(rows[kept]), rtol=1e-4, atol=1e-5)
        assert_same(gradients(loss, masked), gradients(loss, rows[kept]), rtol=1e-4, atol=1e-5)


def test_rows_of_which_something_counts_are_looked_at(make_loss, rows):
    if isinstance(make_loss(), CHAILoss):
        pytest.skip("it has no model that reads tokens")
    rows["tokens"][3, ..., 1] = 10_000
    mask = torch.ones(rows["tokens"].shape, dtype=torch.bool)
    mask[3, ..., 2:] = False
    with pytest.raises(ValueError, match=r"Row \d has a token id out of range at position 1"):
        make_loss()(rows.set(("collector", "mask"), mask))
    mask[3] = False
    make_loss()(rows.set(("collector", "mask"), mask))


def test_what_is_no_row_is_refused(make_loss, rows):
    loss, learned = make_loss(), torch.ones(rows["tokens"].shape)
    for error, key, value, message in (
        (TypeError, "attention_mask", rows["attention_mask"].long(), "attention_mask must be bool"),
        (ValueError, "attention_mask", rows["attention_mask"][:, :-1], "attention_mask must have shape"),
        (TypeError, "train_mask", learned, "train_mask must be bool"),
        (TypeError, ("collector", "mask"), learned, r"'mask'\) must be bool"),
        (ValueError, "next", rows.clone(), "rows_from_rollout"),
    ):
        with pytest.raises(error, match=message):
            loss(rows.clone().set(key, value))
    with pytest.raises(KeyError, match=r"agent_mask.*set_keys"):
        loss(rows.exclude("agent_mask"))


def test_rows_without_an_action_cost_nothing_and_break_nothing(make_loss, rows):
    quiet = rows.clone()
    quiet["agent_mask"] = torch.zeros_like(quiet["agent_mask"])
    quiet["token_reward"] = torch.zeros_like(quiet["token_reward"])
    loss = make_loss()
    if getattr(loss, "transition_weight", 0):
        loss.transition_weight = 0.0
    out = loss(quiet)
    assert all(float(value.detach()) == 0 for value in models.losses_of(out).values())
    models.total(out).backward()


def test_forms_of_the_same_rows(make_loss, rows):
    """Int32 tokens from disk, a lazy stack, any order and any shape of the batch."""
    loss, stored = make_loss(), rows.clone().set("tokens", rows["tokens"].int())
    expected = loss(rows)
    assert_same(loss(stored), expected, rtol=0, atol=0)
    assert stored["tokens"].dtype == torch.int32
    assert_same(loss(LazyStackedTensorDict(*rows.unbind(0))), expected, rtol=1e-6, atol=1e-7)
    assert_same(loss(rows.reshape(2, 3)), expected, rtol=1e-6, atol=1e-7)
    assert_same(loss(rows[torch.tensor([3, 1, 5, 0, 2, 4])]), expected, rtol=1e-5, atol=1e-6)
    assert_same(loss(rows[2]), loss(rows[2:3]), rtol=1e-6, atol=1e-7)


def with_names(actor, hidden="state"):
    """The same actor, whose modules write and read other entries."""
    trunk, head, _ = actor.module
    options = {"distribution_class": torch.distributions.Categorical, "in_keys": {"logits": ("own", "scores")}}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(trunk.module, in_keys=trunk.in_keys, out_keys=[hidden]),
        TensorDictModule(head.module, in_keys=[hidden], out_keys=[("own", "scores")]),
        ProbabilisticTensorDictModule(out_keys=["next_token"], **options),
    )


@pytest.mark.parametrize("make", [models.make_ilql, models.make_cql, models.make_psi])
def test_entries_of_networks_may_have_other_names(make, rows, monkeypatch):
    expected = make(actor_weight=0.5)(rows)
    plain, heads = models.make_actor, models.make_heads()
    heads = [TensorDictModule(head.module, in_keys=["state"], out_keys=["x"]) for head in heads]
    monkeypatch.setattr(models, "make_actor", lambda **_: with_names(plain()))
    monkeypatch.setattr(models, "make_heads", lambda **_: heads)
    loss = make(actor_weight=0.5)
    assert_same(loss(rows), expected, rtol=1e-5, atol=1e-6)  # all of the actor counts as trunk
    loss.set_keys(hidden="state", logits=("own", "scores"))
    assert_same(loss(rows), expected, rtol=1e-6, atol=1e-7)
    assert isinstance(loss.scorer.actor_parts.head.module, nn.Linear)
    for wrong in ({"hidden": "hidden"}, {"hidden": "state", "logits": "state"}):
        with pytest.raises(ValueError, match=r"The actor.*: give"):
            loss.set_keys(**wrong)


@pytest.mark.parametrize("hidden", ["features", ("of", "trunk")])
def test_a_reference_with_other_names(hidden, rows):
    """Also where the trunk's output has the name of what it could read."""
    rows = models.rows_for("ppo-exact-in-pieces")
    expected = models.make_ppo(kl_weight=0.1, kl_estimator="exact", reference=frozen_copy(models.make_actor()))(rows)
    actor, head = with_names(models.make_actor(), hidden), models.make_heads()[1].module
    critic = TensorDictModule(head, in_keys=[hidden], out_keys=["state_value"])
    loss = PPOLoss(actor, critic, kl_weight=0.1, kl_estimator="exact", reference=frozen_copy(actor))
    loss.set_keys(hidden=hidden)
    assert_same(loss(rows), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_a_prioritized_sampler_get_their_td_error(make_loss, rows):
    """It is a row's own mean, as of a batch of that row alone, over what a mask leaves."""
    loss = make_loss()
    rows = rows.set(("collector", "mask"), torch.rand(rows["tokens"].shape) < 0.6)
    sampled = rows.clone().set("priority_weight", torch.rand(6))
    before = set(sampled.keys())
    assert_same(loss(sampled), loss(rows))
    if not isinstance(loss, QValueLoss):
        assert set(sampled.keys()) == before
        return
    assert set(sampled.keys()) - before == {"td_error"}
    assert not sampled["td_error"].requires_grad
    each = torch.stack([loss(rows[[i]])["loss_qvalue"] for i in range(6)])
    torch.testing.assert_close(sampled["td_error"], each[:, None])
    loss.set_keys(priority=("of", "rows"))
    loss(sampled)
    torch.testing.assert_close(sampled["of", "rows"], sampled["td_error"])


def test_states_and_copies(make_loss, rows):
    """A state brings another loss to the same numbers; training a copy leaves the loss as it was."""
    loss = make_loss()
    twin, other, before = copy.deepcopy(loss), make_loss(), loss(rows)
    with torch.no_grad():
        for parameter in (*other.parameters(), *twin.parameters()):
            parameter.add_(0.1)
    assert_same(loss(rows), before, rtol=0, atol=0)
    other.load_state_dict(loss.state_dict())
    assert_same(other(rows), before, rtol=0, atol=0)


def networks_of(loss):
    """Names of the networks that a loss has parameters of."""
    names = [name for name in ("actor_network", "qvalue_network", "value_network") if hasattr(loss, f"{name}_params")]
    return names + ["value_trunk"] * (getattr(loss, "value_trunk", None) is not None)


@pytest.mark.filterwarnings("error:optimizer contains")
def test_every_parameter_belongs_to_one_network(make_loss):
    """So that an optimizer takes a group for each, in both ways in which TorchRL's users write it."""
    loss = make_loss()
    assert hasattr(loss, "actor_network_params") == hasattr(loss, "actor_network")
    params = {name: getattr(loss, f"{name}_params") for name in networks_of(loss)}
    groups = [{"params": [*each.parameters()], "lr": 10.0**-i} for i, each in enumerate(params.values())]
    found = [id(weight) for group in torch.optim.Adam(groups).param_groups for weight in group["params"]]
    assert sorted(found) == sorted(map(id, loss.parameters()))
    if not isinstance(loss, QSFTLoss):  # its source of target parameters has the names of tied weights
        leaves = [list(each.flatten_keys().values()) for each in params.values()]
        assert set(found) <= {id(weight) for each in leaves for weight in each}
        torch.optim.Adam([{"params": each} for each in leaves])


def test_networks_as_modules_share_the_parameters(make_loss, rows):
    loss, other = make_loss(), make_loss()
    for name in networks_of(loss):
        mine, copied, its = getattr(loss, name), loss.get_stateful_net(name), other.get_stateful_net(name)
        assert {id(p) for p in copied.parameters()} <= {id(p) for p in loss.parameters()}
        assert len([*copied.parameters()]) == len([*mine.parameters()])  # tied weights stay tied
        assert loss.get_stateful_net(name, copy=False) is mine is not copied
        with torch.no_grad():
            torch._foreach_add_([*its.parameters()], 0.1)
        loss.from_stateful_net(name, its)
    assert_same(loss(rows), other(rows), rtol=0, atol=0)


def test_value_estimators_by_torchrls_rules(make_loss):
    """Those that a loss has are taken by kind or name; all else is refused by the loss's name."""
    loss = make_loss()
    name, known = type(loss).__name__, [kind for kind in ValueEstimators if kind in loss._estimators]
    for kind in known:
        assert loss.make_value_estimator(kind, device="cpu", differentiable=False, gamma=0.9) is loss
        assert (loss.gamma, loss.value_type) == (0.9, kind)
        assert loss.make_value_estimator(kind.name.lower()).value_type == kind
        with pytest.raises(NotImplementedError, match=f"{name} has no differentiable=True: its targets are constants"):
            loss.make_value_estimator(kind, differentiable=True)
        with pytest.raises(TypeError, match=r"Unknown hyperparameters \['nonsense'\]"):
            loss.make_value_estimator(kind, nonsense=1)
    refused = [*(set(ValueEstimators) - set(known)), "unknown"]
    if isinstance(loss, PPOLoss):
        assert loss.value_estimator.out_keys == ["advantage", "value_target", "state_value"]
    else:
        refused += [GAE(gamma=0.9, lmbda=0.8, value_network=None), TD0Estimator]
        with pytest.raises(NotImplementedError, match=f"{name} has no value_estimator to call on rows: it"):
            _ = loss.value_estimator
    for kind in refused if known else [*refused, None]:
        with pytest.raises(NotImplementedError, match=f"{name} has (the|no) value estimators.*, got .*: it"):
            loss.make_value_estimator(kind)


def test_gradient_checkpointing_changes_no_gradient(make_loss, rows):
    loss = make_loss()
    plain = gradients(loss, rows)
    for module in loss.modules():
        if hasattr(module, "gradient_checkpointing") and callable(module.gradient_checkpointing):
            module.gradient_checkpointing(True)
    loss.train()
    assert_same(gradients(loss, rows), plain, rtol=1e-4, atol=1e-6)


def test_bf16_autocast_is_close_and_sums_in_float32(make_loss, rows):
    loss = make_loss()
    expected = loss(rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = loss(rows)
    for key, value in models.losses_of(out).items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[key], rtol=0.05, atol=0.05)


def test_a_language_model_in_half_precision(make_loss, rows, monkeypatch):
    """Heads of float32 on top of it: losses of float32 that are those of single precision up to rounding."""
    expected, whole = models.losses_of(make_loss()(rows)), models.make_actor
    monkeypatch.setattr(models, "make_actor", lambda *args, **options: whole(*args, **options).bfloat16())
    loss = make_loss()
    out = models.losses_of(loss(rows))
    for key, value in out.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[key], rtol=0.1, atol=0.1)
    models.total(out).backward()
    assert all(p.grad.isfinite().all() for p in loss.parameters() if p.grad is not None)


def test_values_are_checked_in_every_call(make_loss, rows):
    """Rows that count are named by their number in the batch; masked ones may hold anything."""
    loss, spoilt, shape = make_loss(), models.with_a_hole(rows), rows["tokens"].shape[:-1]
    kept = torch.arange(shape.numel()).reshape(shape)
    for _ in range(2):
        loss(rows)
        with pytest.raises(ValueError, match="Row 1 has a real token right of padding at position 3"):
            loss(spoilt.clone().set(("collector", "mask"), kept > 0))
        loss(spoilt.clone().set(("collector", "mask"), kept != 1))


def test_no_rows_give_zero_losses_with_zero_gradients(make_loss, rows):
    for reduction, shape in (("mean", (0,)), ("sum", (0, 3)), ("none", (0, 3))):
        loss = make_loss(reduction=reduction)
        out = loss(rows[:0].reshape(*shape))
        assert set(out.keys()) == set(loss.out_keys)
        for value in models.losses_of(out).values():
            assert value.shape == ((*shape, *rows["tokens"].shape[1:]) if reduction == "none" else ())
            assert not value.any()
        models.total(out).backward()
        assert not any(p.grad.any() for p in loss.parameters() if p.grad is not None)


def test_tensors_are_taken_by_keys_and_the_train_mask_is_an_optional_one(make_loss, rows):
    loss = make_loss()
    learned = torch.rand(rows["tokens"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert {"train_mask", ("collector", "mask")} <= set(loss.optional_in_keys)
    expected = loss(rows.clone().set("train_mask", learned))
    assert any(not torch.equal(value, expected[key]) for key, value in models.losses_of(loss(rows)).items())
    found = loss(*(rows[key] for key in loss.in_keys), train_mask=learned)
    assert_same(by_key(loss, found), expected)


@contextmanager
def rewards_of_others():
    """Losses take rows that have rewards where the agent wrote nothing, which they refuse elsewhere."""
    plain = base.check_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "check_values", lambda *entries, **options: plain(*entries[:3], None, **options))
        yield


def with_rewards_of_others(rows):
    return rows.clone().set("token_reward", torch.where(rows["agent_mask"], rows["token_reward"], 1e3))


def test_rewards_count_at_the_agents_tokens_only(make_loss, rows):
    with rewards_of_others():
        assert_same(make_loss()(with_rewards_of_others(rows)), make_loss()(rows), rtol=0, atol=0)


def test_what_stands_behind_the_last_decision_changes_nothing(make_loss, rows):
    if make_loss().transition_weight or isinstance(make_loss(), CHAILoss):
        pytest.skip("the environment's tokens are learned, or none is read")
    rows["terminated"][:] = True
    behind = rows["agent_mask"].flip(-1).cummax(-1).values.flip(-1).logical_not() & rows["attention_mask"]
    assert behind.any()
    other = rows.clone().set("tokens", torch.where(behind, (rows["tokens"] + 3) % models.VOCAB, rows["tokens"]))
    assert_same(gradients(make_loss(), other), gradients(make_loss(), rows), rtol=1e-4, atol=1e-6)


def spoken():
    """The reference of PPO over utterances."""
    actor = models.make_actor(seed=5)
    return frozen_copy(UtteranceActor(actor, models.CONTROL, 4, forbidden=(), temperature=0.7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    # Between them: trunks, targets, values over the vocabulary, likelihoods, references, utterances.
    [
        lambda: models.make_qbackup(BCQLoss, threshold=0.2),
        lambda: models.LOSSES["ppo-utterance-own-trunk"](kl_estimator="exact", reference=spoken()),
    ],
    ids=["bcq", "ppo"],
)
@pytest.mark.filterwarnings("ignore:GPT2Model decodes without a key-value cache:UserWarning")  # it is replaced
def test_compile_gives_the_same_losses_and_values_are_checked(make, request, monkeypatch):
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)
    loss, rows = make(), models.rows_for(request.node.callspec.id)
    loss._find = torch.compiler.disable(loss._find)  # what all losses read alike is compiled in test_base.py
    expected = models.losses_of(loss(rows))
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager")
    assert_same(models.losses_of(compiled(rows)), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="a real token right of padding"):
        compiled(models.with_a_hole(rows))


def test_gradient_is_that_of_finite_differences(make_loss, rows):
    """In a random direction of the embeddings, for the terms that are no targets to themselves."""
    loss = make_loss().double()
    data = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    if not isinstance(loss, ArCHerLoss | CHAILoss | PPOLoss):
        loss.value_weight = loss.qvalue_weight = loss.advantage_temperature = 0.0
    if isinstance(loss, OREOLoss):
        loss.actor_weight = 0.0  # its gradient stops at later tokens: test_oreo.py
    models.total(loss(data)).backward()
    trained = {name: p for name, p in loss.named_parameters() if p.grad is not None}
    weight = next(p for name, p in trained.items() if name.endswith(("wte.weight", "in_weight")))
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = (weight.grad * direction).sum()
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight.add_(step * direction)
            values.append(models.total(loss(data)))
    torch.testing.assert_close(slope, (values[0] - values[1]) / 2e-6, rtol=1e-5, atol=1e-7)
