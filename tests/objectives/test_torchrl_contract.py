"""What TorchRL's own generic tests of losses check, on every loss of this library and that of algorithm distillation.

They stand in its repository, ``test/objectives``: ``LossModuleTestBase``, ``test_loss_module.py``, and the tests that
each class of losses repeats. ``test_contract.py`` checks others of them: inputs left as they were, states,
``td_error``, value estimators, networks as modules.

These of theirs have nothing to check here: new first weights, composite distributions and target entropies, which no
loss of ours has; ``MultiStep``, since a row holds whole episodes and ``target="lambda"`` looks several steps ahead;
several functional copies of a Q-function under ``vmap``, since a head computes all of its values at once; coefficients
as buffers, since weights are plain numbers; weights of a prioritized sampler, which are not used.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, replace

import pytest
import torch
from tensordict import assert_allclose_td
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl.modules import recurrent_mode
from torchrl.objectives import HardUpdate, SoftUpdate

from tests.algorithm_distillation.models import model, windows
from tests.objectives.models import LOSSES, losses_of, make_cql, make_ppo, rows_for, total, unread, whole_rows
from tests.objectives.test_contract import assert_same, by_key, networks_of
from torchrl_lang import objectives
from torchrl_lang.algorithm_distillation import ADLoss
from torchrl_lang.objectives import ArCHerLoss, CHAILoss, OREOLoss, QSFTLoss, UtteranceILQLLoss
from torchrl_lang.objectives.base import RowLoss
from torchrl_lang.objectives.preference import PreferenceLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
AD = {"reward_weight": 0.5, "observation_weight": 2.0, "log_prob_weight": 0.25}
# Heads whose parameters a term trains, beside those of the trunk that they read; other terms train the actor.
HEADS = {"loss_value": "value_network", "loss_critic": "value_network"}
HEADS |= dict.fromkeys(("loss_qvalue", "loss_cql", "loss_margin"), "qvalue_network")


@pytest.fixture(params=[*sorted(LOSSES), "ad"])
def make(request):
    return LOSSES.get(request.param, lambda **options: ADLoss(model(), **AD, **options))


@pytest.fixture
def rows(request):
    name = request.node.callspec.params["make"]
    return windows(model()) if name == "ad" else rows_for(name)


def targets(loss):
    return {name: child for name, child in loss.named_children() if name.startswith("target_")}


def moved(loss):
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_every_loss_is_tried():
    classes = {value for value in vars(objectives).values() if isinstance(value, type)}
    assert {type(build()) for build in LOSSES.values()} == classes


def test_set_keys(make):
    """``tensordict_keys_test``, and ``test_instantiate_with_different_keys``."""
    loss, other = make(), make()
    default = loss._AcceptedKeys()
    assert loss.tensor_keys == default
    checked = {"hidden", "logits"} if hasattr(loss, "actor_network") else set()  # against what the actor writes
    names = asdict(default).keys() - checked
    for name in names:
        loss.set_keys(**{name: "new"})
        assert loss.tensor_keys == replace(default, **{name: "new"})
        loss.set_keys(**{name: None})
    loss.set_keys(**dict.fromkeys(names, ("a", "new")))
    assert loss.tensor_keys == replace(default, **dict.fromkeys(names, ("a", "new")))
    assert other.tensor_keys == default
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(unknown_key="new")


def test_a_value_estimator_has_the_keys_of_its_loss():
    """``set_advantage_keys_through_loss_test``, and the other way round."""
    loss, rows = make_ppo(), rows_for("ppo").exclude("advantage", "value_target")
    loss.set_keys(advantage="my_advantage")
    estimator = loss.make_value_estimator("td0").value_estimator
    assert estimator.tensor_keys.advantage == "my_advantage"
    estimator.set_keys(value_target=("my", "target"))
    assert loss.tensor_keys.value_target == ("my", "target")
    loss(estimator(rows))
    assert [key in rows.keys(True) for key in estimator.out_keys] == [True] * 3
    assert "advantage" not in rows.keys()


def test_tensors_by_names(make, rows):
    """``test_*_notensordict``: renamed and nested entries, and fewer outputs."""
    loss = make()
    expected, entries = loss(rows), dict(zip(loss.in_keys, loss.in_keys, strict=True))
    for name, key in asdict(loss.tensor_keys).items():
        if key in entries:
            entries[("of", f"my_{name}")] = entries.pop(key)
            loss.set_keys(**{name: ("of", f"my_{name}")})
    tensors = {"_".join(key): rows[old] for key, old in entries.items()}
    assert_same(by_key(loss, loss(**tensors)), expected)
    last = [*losses_of(expected)][-1]
    loss.select_out_keys(last)
    torch.testing.assert_close(loss(**tensors), expected[last])


def test_each_term_trains_its_networks_and_their_sum_all(make, rows):
    """As in ``test_cql`` and its like: no other network, no target, and no parameter or buffer under two names."""
    loss = make()
    out = loss(rows)
    for key, value in losses_of(out).items():
        if isinstance(loss, ADLoss) or not value.requires_grad:  # of weight zero
            continue
        loss.zero_grad()
        value.backward(retain_graph=True)
        head = HEADS.get(key)
        trunk = "value_trunk" if getattr(loss, "value_trunk", None) is not None else "actor_network"
        expected = {head, trunk} if hasattr(loss, f"{head}_params") else {"actor_network"}
        params = {name: getattr(loss, f"{name}_params").parameters() for name in networks_of(loss)}
        found = {name for name, each in params.items() if any(p.grad is not None and p.grad.any() for p in each)}
        assert found == expected & params.keys(), key
    loss.zero_grad()
    total(out).backward()
    assert all(parameter.grad.any() for parameter in loss.parameters() if parameter not in unread(loss))
    assert not any(leaf.requires_grad for params in targets(loss).values() for leaf in params.values(True, True))
    for named in (loss.named_parameters(), loss.named_buffers()):
        ids = [id(tensor) for _, tensor in named]
        assert len(set(ids)) == len(ids)


def test_casts(make, rows):
    """``TestBuffer``, ``test_shared_params`` and ``test_param_buffer_types``: the same tensors, tied as before."""
    loss = make()
    before = [{id(tensor) for tensor in tensors} for tensors in (loss.parameters(), loss.buffers())]
    loss.to(torch.float64)
    assert [{id(tensor) for tensor in tensors} for tensors in (loss.parameters(), loss.buffers())] == before
    assert all(isinstance(parameter, nn.Parameter) for parameter in loss.parameters())
    assert {t.dtype for t in (*loss.parameters(), *loss.buffers()) if t.is_floating_point()} == {torch.float64}
    for leaf in (leaf for params in targets(loss).values() for leaf in params.values(True, True)):
        assert leaf.dtype == torch.float64
        assert not leaf.requires_grad
    data = rows.apply(lambda value: value.double() if value.is_floating_point() else value)
    out, single = losses_of(loss(data)), losses_of(make()(rows))
    assert_same({key: value.float() for key, value in out.items()}, single, rtol=1e-3, atol=1e-4)


def test_modules_run_deterministically(make, rows):
    """``test_loss_exploration`` and ``test_decorators``."""
    loss, seen = make(), []
    for module in (*loss.modules(), *(getattr(loss, "qvalue_network", None) or nn.Module()).modules()):
        module.register_forward_pre_hook(lambda *_: seen.append((exploration_type(), recurrent_mode())))
    with set_exploration_type(ExplorationType.RANDOM):
        loss(rows)
        assert exploration_type() == ExplorationType.RANDOM
    assert set(seen[1:]) == {(ExplorationType.DETERMINISTIC, True)}  # the first is the loss itself
    assert not recurrent_mode()


@pytest.mark.parametrize(("update", "steps"), [(HardUpdate, 2), (SoftUpdate, 1)])
def test_target_updaters(make, rows, update, steps):
    """``test_updater`` and ``test_*_batcher``: networks follow the parameters, targets the updater alone.

    The targets of a copy of a loss in training do not become trainable, and are what it reads.
    """
    loss, options = make(), {"value_network_update_interval": steps - 1} if update is HardUpdate else {"eps": 0.5}
    if not targets(loss):
        with pytest.raises(RuntimeError, match="Did not find any target parameters or buffers"):
            update(loss, **options)
        return
    updater, old = update(loss, **options), {name: params.clone() for name, params in targets(loss).items()}
    given = [parameter for name in networks_of(loss) for parameter in getattr(loss, name).parameters()]
    before = [parameter.clone() for parameter in given]
    moved(loss)
    assert all((one != other).all() for one, other in zip(given, before, strict=True))
    for step in range(steps):
        for name, params in targets(loss).items():
            assert_allclose_td(params.data, old[name].data, msg=f"after {step} steps")
        updater.step()
    for name, params in targets(loss).items():
        source, keep = getattr(loss, name.removeprefix("target_")), 0.0 if update is HardUpdate else 0.5
        for key, value in params.items(True, True):
            torch.testing.assert_close(value.data, keep * old[name][key].data + (1 - keep) * source[key].data)
    loss(rows)
    twin = copy.deepcopy(loss)
    assert not any(leaf.requires_grad for params in targets(twin).values() for leaf in params.values(True, True))
    updater = update(twin, **options)
    if not isinstance(twin, QSFTLoss):  # weights this large leave its target the same
        moved(twin)
        read = next(key for key in ("target_qvalue", "td_target", "candidate_value") if key in twin.out_keys)
        before = twin(rows)[read]
        for _ in range(steps):
            updater.step()
        assert not torch.allclose(twin(rows)[read], before)


def test_masks(make, rows):
    """``TestLossMaskReduction``."""
    loss, random = make(reduction="sum"), torch.Generator().manual_seed(3)
    shape = rows.get("tokens", rows.get("action", None)).shape
    a, b = (torch.rand(shape, generator=random) < 0.7 for _ in range(2))
    plain, collector = losses_of(loss(rows)), ("collector", "mask")
    result = lambda **masks: losses_of(loss(rows.clone().update(masks)))  # noqa: E731
    expected = losses_of(loss(rows.clone().set(collector, a & b)))
    assert any(not torch.equal(value, plain[key]) for key, value in expected.items())
    assert_same(result(collector={"mask": a}, shifted_valid=b), expected)
    assert_same(result(collector={"mask": (a & b)[..., None]}), expected)
    few = torch.arange(len(rows)) > 2
    whole = whole_rows(few, rows)[..., None] if isinstance(loss, RowLoss) else few[:, None].expand(shape)
    assert_same(result(collector={"mask": whole}), losses_of(loss(rows[few])), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"mask.* shape"):
        result(shifted_valid=a[..., None].expand(*shape, 3))
    none = make(reduction="none")
    at, everywhere = (losses_of(none(data)) for data in (rows.clone().set("shifted_valid", a), rows))
    # The others have terms of whole utterances or rows.
    if not isinstance(loss, ArCHerLoss | CHAILoss | UtteranceILQLLoss | OREOLoss | PreferenceLoss):
        assert_same(at, {key: torch.where(a, value, 0.0) for key, value in everywhere.items()})
    for key, masks, found in (
        (("my", "valid"), {"my": {"valid": a & b}, "shifted_valid": a}, expected),
        ("absent", {"shifted_valid": a}, plain),
        (None, {"shifted_valid": a}, plain),
    ):
        loss.loss_mask_key = key
        assert_same(result(**masks), found)
    for bad in (0, 1.5, ("mask", None)):
        with pytest.raises(ValueError, match="loss_mask_key"):
            loss.loss_mask_key = bad


def test_what_has_no_meaning_is_refused_by_name(make):
    """``test_reset_parameters_recursive``: weights are not drawn again, as its caller expects, so it is no success."""
    loss = make()
    name = type(loss).__name__
    with pytest.raises(NotImplementedError, match=f"{name} does not initialize the weights of its .*: build"):
        loss.reset_parameters_recursive()
    if isinstance(loss, ADLoss):
        assert loss.get_stateful_net("model") is loss.model
        with pytest.raises(NotImplementedError, match="ADLoss has no value estimators: it imitates"):
            _ = loss.value_estimator


def test_coefficients_are_set_by_torchrls_names():
    """``TestSchedulableBuffers``: what is set while training is what the next call weighs by."""
    rows, loss, none = rows_for("ppo"), make_ppo(), make_ppo(critic_coeff=None)
    loss.critic_coeff, loss.entropy_coeff, loss.clip_value, loss.clip_epsilon = 0.25, 0.003, 0.5, 0.1
    expected = make_ppo(value_weight=0.25, entropy_weight=0.003, value_clip=0.5, clip_epsilon=0.1)(rows)
    assert_same(loss(rows), expected, rtol=0, atol=0)
    assert (loss.entropy_coeff, loss.clip_epsilon) == (0.003, (0.1, 0.1))
    none.critic_coeff = 0.5
    assert_same(none(rows), make_ppo()(rows), rtol=0, atol=0)
    loss.clip_value, loss.critic_coeff = True, None
    assert (loss.value_clip, loss.value_weight) == (0.1, 0)
    loss.clip_value = False
    assert loss.value_clip is None
    for given, before in (
        ({"entropy_coeff": 0.1}, 0.1),
        ({}, 0.01),
        ({"entropy_coeff": 0.1, "entropy_bonus": False}, 0.1),
    ):
        switched = make_ppo(**given)
        switched.entropy_bonus = True
        assert (switched.entropy_bonus, switched.entropy_coeff) == (True, before)
        switched.entropy_bonus = False
        assert (switched.entropy_bonus, switched(rows)["loss_entropy"].item()) == (False, 0)
    with pytest.raises(ValueError, match="clip_epsilon must be"):
        loss.clip_epsilon = -1
    for name in ("critic_coeff", "value_weight", "clip_value"):
        with pytest.raises(ValueError, match=r"must lie in .*, got -1"):
            setattr(loss, name, -1)
    rows, loss = rows_for("cql"), make_cql()
    loss.temperature, loss.min_q_weight = 0.5, 3.0
    assert_same(loss(rows), make_cql(temperature=0.5, min_q_weight=3.0)(rows), rtol=0, atol=0)
    loss.temperature = 2.0  # TorchRL's two are independent
    assert_same(loss(rows), make_cql(temperature=2.0, min_q_weight=3.0)(rows), rtol=0, atol=0)
    loss.set_vmap_randomness("different")
    assert loss.vmap_randomness == "different"
