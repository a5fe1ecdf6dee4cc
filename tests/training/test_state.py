from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import UNUSUAL
from torchrl_lang.training.state import join_state, split_state

PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(UNUSUAL, max_size=3)
TORCH = st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")])
KEYS = st.integers(-2, 2) | st.text(alphabet="a/012'", max_size=3) | st.booleans() | st.none()
NESTED = st.recursive(
    PLAIN | st.builds(lambda n: torch.arange(n), st.integers(0, 3)) | TORCH,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        # By position: True and 1 are one key to Python, so types are compared as well.
        return len(one) == len(other) and all(
            same(j, k) and same(v, w) for (j, v), (k, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one != other


@settings(max_examples=40, deadline=None)
@given(NESTED)
def test_json_and_back(state):
    tree, tensors = split_state(state)
    assert same(join_state(json.loads(json.dumps(tree, allow_nan=False)), tensors), state)


def test_tied_tensors_are_kept_once_and_views_in_full():
    weight = torch.arange(6.0).reshape(2, 3)
    _, tensors = split_state({"a": weight, "b": weight, "row": weight[0], "turned": weight.T})
    assert list(tensors) == ["state/a", "state/row", "state/turned"]
    assert tensors["state/row"].untyped_storage().nbytes() == 12
    assert tensors["state/turned"].is_contiguous()
    weight += 1  # a later change does not reach the copy
    assert tensors["state/a"][0, 0] == 0
    with pytest.raises(TypeError, match="'model/layers/1' is a object"):
        split_state({"layers": [0, object()]}, "model")
