"""Weights that are not finite, and configurations of models that are not loaded."""

import pytest
import torch

from torchrl_lang._files import FileError, check_loaded_weights, check_model_config, non_finite


def test_only_numbers_that_are_stored_as_floats_can_be_non_finite():
    finite = {
        "integers": torch.arange(3),
        "nothing": torch.zeros(0),
        "no storage": torch.zeros(2, device="meta"),
        "a byte each": torch.full((2,), float("nan")).to(torch.float8_e5m2),  # quantized
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    assert non_finite(finite.items()) == []
    bad = {name: torch.tensor([0.0, float(name)], dtype=torch.float16) for name in ("nan", "inf", "-inf")}
    assert non_finite((finite | bad).items()) == [*bad]


@pytest.mark.parametrize("dtype", ["float32", "torch.bfloat16", "auto", None])
def test_dtypes_of_models(dtype):
    check_model_config({"dtype": dtype, "text_config": {"torch_dtype": dtype}}, "config.json", remedy="save it again")


@pytest.mark.parametrize("dtype", ["int8", "float31", "nn", 32, ["float32"]])
def test_what_is_no_dtype_of_a_model(dtype):
    with pytest.raises(FileError, match=r'as "torch_dtype", expected a dtype such as "float32": save it again'):
        check_model_config({"text_config": {"torch_dtype": dtype}}, "config.json", remedy="save it again")


@pytest.mark.parametrize(("names", "shown"), [("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")])
def test_at_most_three_weights_are_named(names, shown):
    info = {"missing_keys": set(names), "unexpected_keys": set(), "mismatched_keys": set()}
    with pytest.raises(FileError, match=f"lacks the weights {shown}, which"):
        check_loaded_weights("model", torch.nn.Linear(2, 3), info, remedy="save it again")
