"""Saved models compute the same; damaged and foreign folders end in one line."""

import json
import os

import pytest
import torch

from tests.algorithm_distillation.models import model, windows
from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation import load_ad_model, save_ad_model

FILES = {"ad_model.json", "model.safetensors", "checksums.json"}


def test_a_loaded_model_computes_the_same(tmp_path, made):
    before = torch.get_rng_state()
    loaded = load_ad_model(save_ad_model(tmp_path / "model", made, trained_on={"tasks": [1, 2]}))
    assert torch.equal(before, torch.get_rng_state())
    assert set(os.listdir(tmp_path / "model")) == FILES
    rows = windows(made)
    for key in made.out_keys:
        assert torch.equal(made(rows.clone())[key], loaded(rows.clone())[key])
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert json.loads((tmp_path / "model" / "ad_model.json").read_text())["trained_on"] == {"tasks": [1, 2]}


def test_a_saved_model_is_replaced_and_other_folders_and_numbers_that_are_none_are_refused(tmp_path):
    save_ad_model(tmp_path / "model", model())
    save_ad_model(tmp_path / "model", model(seed=1))
    loaded = load_ad_model(tmp_path / "model")
    assert torch.equal(loaded.action_head.out.bias, model(seed=1).action_head.out.bias)
    (tmp_path / "model" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"notes.txt"):
        save_ad_model(tmp_path / "model", model())
    torch.nn.init.constant_(loaded.action_head.out.bias, torch.nan)
    with pytest.raises(ValueError, match=r"not finite, such as action_head.out.bias"):
        save_ad_model(tmp_path / "other", loaded)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c.update(width=0), 'has 0 as "width"'),
        (lambda c: c.update(width=10**6), "does not hold the model's tensors"),
        (lambda c: c.update(layers=3), r"trunk.blocks.2"),
        (lambda c: c.update(layers=10**12), "layers"),
        (lambda c: c.update(action={"size": True}), "action"),
        (lambda c: c.pop("observation"), 'has no field "observation"'),
    ],
)
def test_wrong_descriptions(tmp_path, change, message):
    """With right checksums, as another program might write them."""
    folder = save_ad_model(tmp_path / "model", model())
    reseal(folder / "ad_model.json", change)
    with pytest.raises(FileError, match=message):
        load_ad_model(folder)
