"""Every loss works on rows with features in front: its numbers are those of rows that are read one by one."""

from __future__ import annotations

import pytest
import torch

from tests.objectives import conftest, test_ppo
from tests.objectives import test_contract as contract
from tests.objectives.conftest import LOSSES, WIDTH, losses_of, make_rows
from torchrl_lang.modules import FeatureEmbedding, Trunk, with_features
from torchrl_lang.objectives import BCLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

P, F = 2, 3
EVERY = {**LOSSES, "ppo": test_ppo.make_all_terms, "ppo-exact": test_ppo.make_exact}


@pytest.fixture(autouse=True)
def projectors(monkeypatch):
    """The trunk of every actor of the suite reads features, by a projector of its own."""
    plain = conftest.make_actor

    def make_actor(seed=0, **options):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return with_features(plain(seed, **options), FeatureEmbedding(F, WIDTH))

    for module in (conftest, test_ppo):
        monkeypatch.setattr(module, "make_actor", make_actor)


@pytest.fixture(params=sorted(EVERY))
def make_loss(request):
    return EVERY[request.param]


@pytest.fixture
def rows(make_loss):
    generator = torch.Generator().manual_seed(8)
    rows = make_rows()
    rows["features"] = torch.randn(6, P, F, generator=generator)
    return test_ppo.acted(rows) if make_loss in (EVERY["ppo"], EVERY["ppo-exact"]) else rows


@pytest.fixture
def masked(rows):
    return rows.set("features_mask", torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [0, 1]]).bool())


def read_one_by_one(trunk, tokens, attention_mask=None, features=None, features_mask=None):
    """What a trunk writes, by a plain loop over rows and the language model alone."""
    out = [torch.zeros(*tokens.shape, WIDTH) for _ in range(1 + trunk.expose_pre_norm)]
    words = trunk.model.get_input_embeddings()
    for row in range(tokens.shape[0]):
        ids = tokens[row][attention_mask[row]]
        shown = features[row] if features_mask is None else features[row][features_mask[row]]
        embedded = words(ids) if trunk.returns is None else trunk.returns.embed(ids, words, trunk.vocab_size)
        whole = torch.cat([trunk.features.project(shown), embedded])
        states = [trunk.model(inputs_embeds=whole[None]).last_hidden_state]
        kept, trunk._pre_norm = trunk._pre_norm, None
        for one, state in zip(out, [*states, kept], strict=False):
            one[row, : len(ids)] = state[0, len(shown) :]
    return tuple(out) if trunk.expose_pre_norm else out[0]


def test_numbers_and_gradients_are_those_of_rows_read_one_by_one(make_loss, masked, monkeypatch):
    loss = make_loss()
    found, gradients = loss(masked), contract.gradients(loss, masked)
    monkeypatch.setattr(Trunk, "forward", read_one_by_one)
    contract.assert_same(found, loss(masked), rtol=1e-4, atol=1e-6)
    expected = contract.gradients(loss, masked)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_every_projector_that_a_loss_trains_gets_a_gradient(make_loss, rows):
    loss = make_loss()
    contract.gradients(loss, rows)
    trunks = [module for module in loss.modules() if isinstance(module, Trunk)]
    assert trunks
    for parameter in [p for trunk in trunks for p in trunk.features.parameters()]:
        assert parameter.grad.abs().sum() > 0


def test_features_matter_and_masked_ones_do_not(make_loss, masked):
    loss = make_loss()
    expected = losses_of(loss(masked))
    other = masked.clone()
    other["features"][~masked["features_mask"]] = torch.nan
    contract.assert_same(losses_of(loss(other)), expected, rtol=0, atol=0)
    other = masked.clone()
    other["features"] += 1.0
    changed = losses_of(loss(other))
    assert any(not torch.allclose(changed[key], expected[key]) for key in expected)


def test_keys_name_the_features(make_loss, masked):
    loss = make_loss()
    assert "features" in loss.in_keys
    assert "features_mask" in loss.optional_in_keys
    expected = loss(masked)
    given = {key: masked[key] for key in loss.in_keys}
    out = loss(*given.values(), features_mask=masked["features_mask"])
    for value, key in zip(out if isinstance(out, tuple) else (out,), loss.out_keys, strict=True):
        torch.testing.assert_close(value, expected[key], equal_nan=True)
    with pytest.raises(KeyError, match=r"Loss needs 'features', found only .*set_keys\(features="):
        loss(masked.exclude("features"))
    moved = masked.clone()
    for name in ("features", "features_mask"):
        moved.rename_key_(name, ("image", name))
    loss.set_keys(features=("image", "features"), features_mask=("image", "features_mask"))
    assert ("image", "features") in loss.in_keys
    contract.assert_same(loss(moved), expected, rtol=0, atol=0)


def test_values_are_estimated_with_the_features(monkeypatch):
    rows = make_rows()
    rows["features"] = torch.randn(6, P, F)
    loss = test_ppo.make_ppo()
    found = loss.estimate(rows.clone())
    monkeypatch.setattr(Trunk, "forward", read_one_by_one)
    expected = loss.estimate(rows.clone())
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    moved = rows.clone().rename_key_("features", "image")
    loss.set_keys(features="image")
    torch.testing.assert_close(loss.estimate(moved)["advantage"], found["advantage"], rtol=1e-4, atol=1e-5)


def test_a_plain_model_may_have_a_column_of_that_name(make_loss, rows, monkeypatch):
    """Ids of another kind, which no trunk reads."""
    reading = conftest.make_actor
    for module in (conftest, test_ppo):
        monkeypatch.setattr(module, "make_actor", lambda *args, **kw: with_features(reading(*args, **kw), None))
    bare = rows.exclude("features")
    named = bare.clone().set("features", torch.arange(6))
    torch.manual_seed(0)
    expected = losses_of(make_loss()(bare))
    torch.manual_seed(0)
    contract.assert_same(losses_of(make_loss()(named)), expected, rtol=0, atol=0)


def test_a_loss_whose_actor_reads_no_features_asks_for_none():
    conftest_actor = with_features(conftest.make_actor(), None)
    loss, rows = BCLoss(conftest_actor), make_rows()
    assert "features" not in loss.in_keys
    assert "features_mask" not in loss.optional_in_keys
    assert loss(rows)["loss_actor"] > 0
