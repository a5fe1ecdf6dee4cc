"""Rows that are well-formed pass; for every way to be wrong there is an error that says which."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.schema import ROW_KEYS, ControlTokens, check_row


def rows(**edits):
    td = TensorDict(
        tokens=torch.tensor([[3, 7, 2, 8, 1, 0], [4, 8, 1, 0, 0, 0]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]]).bool(),
        agent_mask=torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]]).bool(),
        token_reward=torch.tensor([[0, 0, 0, 0, -1, 0], [0, 0, 0.5, 0, 0, 0]]),
        batch_size=[2],
    )
    for key, (index, value) in edits.items():
        td[key][index] = value
    return td


def test_good_rows_pass():
    check_row(rows())
    check_row(rows(), vocab_size=9)
    check_row(rows().reshape(2, 1), vocab_size=9)
    check_row(rows()[0])
    check_row(rows().set("tokens", rows()["tokens"].int()))
    check_row(rows(tokens=((0, 5), -7)), vocab_size=9)  # padding may hold anything


@pytest.mark.parametrize("key", ROW_KEYS)
def test_a_missing_entry(key):
    with pytest.raises(KeyError, match=f"A row needs '{key}', found only"):
        check_row(rows().exclude(key))


@pytest.mark.parametrize(
    ("key", "dtype", "expected"),
    [
        ("tokens", torch.float32, "int64 or int32"),
        ("attention_mask", torch.int64, "bool"),
        ("agent_mask", torch.float32, "bool"),
        ("token_reward", torch.float64, "float32"),
    ],
)
def test_another_dtype(key, dtype, expected):
    td = rows()
    with pytest.raises(TypeError, match=f"{key} must be {expected}, got {dtype}"):
        check_row(td.set(key, td[key].to(dtype)))
    if key != "tokens":  # whose shape the others must have
        with pytest.raises(ValueError, match=rf"{key} must have shape \(2, 6\) to go with the rows, got \(2, 5\)"):
            check_row(rows().set(key, rows()[key][:, :5]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"attention_mask": ((1, 4), True)}, "Row 1 has a real token right of padding at position 4"),
        ({"agent_mask": ((1, 3), True)}, "Row 1 has an agent's token on padding at position 3"),
        ({"token_reward": ((0, 1), 1.0)}, "Row 0 has a reward on a token that the agent did not write at position 1"),
        ({"token_reward": ((0, 4), float("nan"))}, "Row 0 has a reward that is not finite at position 4"),
        ({"agent_mask": ((1, 0), True)}, "Row 1 has an agent's token at position 0: a loss needs a token before it"),
        ({"tokens": ((0, 3), 9)}, r"Row 0 has a token id out of range at position 3: ids lie in \[0, 9\)"),
    ],
)
def test_values_that_cannot_be(edit, message):
    with pytest.raises(ValueError, match=message):
        check_row(rows(**edit), vocab_size=9)


def test_control_tokens_differ():
    control = ControlTokens(5, 4, 3, 2, 1, 0)
    assert control.ids() == (5, 4, 3, 2, 1, 0)
    assert set(control.forbidden_in_action()) == {5, 3, 2, 1, 0}
    with pytest.raises(ValueError, match="need different ids"):
        ControlTokens(0, 1, 2, 3, 4, 4)
    assert ControlTokens(5, 4, 3, 2, 1, 0, vocab_size=6).vocab_size == 6
    for ids, vocab_size in (((6, 4, 3, 2, 1, 0), 6), ((5, 4, 3, 2, 1, -2), None)):
        with pytest.raises(ValueError, match=r"lie in \[0, vocab_size\)"):
            ControlTokens(*ids, vocab_size=vocab_size)


def test_control_tokens_of_a_chat_template():
    control = ControlTokens(pad=0, end_of_action=4, vocab_size=9, forbidden=(7, 8))
    assert not control.marks_turns
    assert control.ids() == (0, 4)
    assert control.forbidden_in_action() == (0, 7, 8)
    assert ControlTokens(5, 4, 3, 2, 1, 0).marks_turns
    with pytest.raises(ValueError, match="different ids"):
        ControlTokens(0, 1, 2)
    with pytest.raises(ValueError, match=r"lie in \[0, vocab_size\)"):
        ControlTokens(0, 1, vocab_size=9, forbidden=(9,))


def test_features_go_with_the_rows():
    seen = rows().update({"features": torch.zeros(2, 3, 4), "features_mask": torch.ones(2, 3, dtype=torch.bool)})
    check_row(seen)
    check_row(seen.exclude("features_mask"))
    for key, wrong, error, match in [
        ("features", seen["features"].long(), TypeError, "features must be a float"),
        ("features", seen["features"][:, 0], ValueError, r"'features' must be \[\*B, P, F\]"),
        ("features", seen["features"][:, :0], ValueError, r"'features' must be \[\*B, P, F\]"),
        ("features_mask", seen["features_mask"].int(), TypeError, "features_mask must be bool"),
        ("features_mask", seen["features_mask"][:, 1:], ValueError, r"features_mask must have shape \(2, 3\)"),
    ]:
        with pytest.raises(error, match=match):
            check_row(seen.clone().set(key, wrong))
