"""States that are handed on: to models with the same lower layers, for the same rows, and to no others."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.modules.test_frozen_states import calls, make_rows
from tests.modules.toys import tiny_lm
from torchrl_lang.modules import language_actor, train_top_layers
from torchrl_lang.modules.frozen.lower_layers import transformer_blocks
from torchrl_lang.modules.frozen.states_of_rows import StatesOfRows
from torchrl_lang.schema import FROZEN_STATES


def trained_on_top(lm, layers=1):
    actor = language_actor(copy.deepcopy(lm))
    train_top_layers(actor, layers)
    return actor


@pytest.fixture
def lm():
    return tiny_lm("llama", layers=3)


@pytest.fixture
def handed(lm):
    """Those of a model, for ``make_rows()``."""
    states = StatesOfRows()
    assert FROZEN_STATES in states.carrying(trained_on_top(lm), make_rows()).keys()
    return states


def test_states_are_read_by_a_model_with_other_upper_layers(lm, handed):
    with torch.no_grad():
        next(transformer_blocks(lm)[2].parameters()).mul_(2)
    other, batch = trained_on_top(lm), make_rows()
    carrying = handed.carrying(other, batch)
    plain = other(batch.copy())["logits"]
    read = calls(other[0].module.model)
    torch.testing.assert_close(other(carrying)["logits"], plain)
    assert read == []


def test_only_one_row_is_computed_again(lm, handed, monkeypatch):
    actor, computed = trained_on_top(lm), []
    kind = type(actor[0].module)
    real = kind.frozen_states
    monkeypatch.setattr(kind, "frozen_states", lambda trunk, *rows: computed.append(len(rows[0])) or real(trunk, *rows))
    handed.carrying(actor, make_rows())
    assert computed == [1]


@pytest.mark.parametrize("change", ["weight", "layers", "dtype", "config", "autocast", "tokens", "mask", "fewer"])
def test_others_are_computed(lm, handed, change):
    actor, batch = trained_on_top(lm, 2 if change == "layers" else 1), make_rows()
    model = actor[0].module.model
    if change == "weight":
        with torch.no_grad():
            model.embed_tokens.weight[3, 5] += 1e-3
    if change == "dtype":
        model.double()
    if change == "config":
        transformer_blocks(model)[0].input_layernorm.variance_epsilon = 10.0
    if change == "tokens":
        batch["tokens"][4, 1] = 2 if batch["tokens"][4, 1] != 2 else 3
    if change == "mask":
        batch["attention_mask"][0] = True
    if change == "fewer":
        batch = batch[:-1]
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        found = handed.carrying(actor, batch)
        expected = StatesOfRows().carrying(actor, batch)
    assert found[FROZEN_STATES].keys() == expected[FROZEN_STATES].keys()
    for one, other in zip(found[FROZEN_STATES].values(), expected[FROZEN_STATES].values(), strict=True):
        real = batch["attention_mask"][:, : one["states"].shape[1]]
        assert torch.equal(one["states"][real], other["states"][real])
