"""Rows that are well-formed pass; for every way to be wrong there is an error that says which."""

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


def seen():
    return rows().update({"features": torch.zeros(2, 3, 4), "features_mask": torch.ones(2, 3, dtype=torch.bool)})


def test_good_rows_pass():
    odd = rows(tokens=((0, 5), -7))  # padding may hold anything
    for good in (rows(), rows().reshape(2, 1), rows()[0], odd, seen()):
        check_row(good, vocab_size=9)
    check_row(rows().set("tokens", rows()["tokens"].int()))
    check_row(seen().exclude("features_mask"))
    for key in ROW_KEYS:
        with pytest.raises(KeyError, match=f"A row needs '{key}', found only"):
            check_row(rows().exclude(key))
    with pytest.raises(KeyError, match=r"found only \[\('next', 'tokens'\)\]"):
        check_row(TensorDict(next=rows().select("tokens")))


SHAPE = "must have shape"
ENTRIES = [
    ("tokens", rows()["tokens"].float(), TypeError, "must be int64 or int32, got torch.float32"),
    ("attention_mask", rows()["attention_mask"].long(), TypeError, "must be bool, got torch.int64"),
    ("agent_mask", rows()["agent_mask"].float(), TypeError, "must be bool"),
    ("token_reward", rows()["token_reward"].double(), TypeError, "must be float32"),
    ("attention_mask", rows()["attention_mask"][:, :5], ValueError, rf"{SHAPE} \(2, 6\).*, got \(2, 5\)"),
    ("agent_mask", rows()["agent_mask"][:, :5], ValueError, SHAPE),
    ("token_reward", rows()["token_reward"][:, :5], ValueError, SHAPE),
    ("features", torch.zeros(2, 3, 4).long(), TypeError, "must be a float"),
    ("features", torch.zeros(2, 4), ValueError, r"' must be \[\*B, P, F\]"),
    ("features", torch.zeros(2, 0, 4), ValueError, r"' must be \[\*B, P, F\]"),
    ("features_mask", torch.ones(2, 3).int(), TypeError, "must be bool"),
    ("features_mask", torch.ones(2, 2).bool(), ValueError, rf"{SHAPE} \(2, 3\)"),
]


@pytest.mark.parametrize(("key", "value", "error", "message"), ENTRIES)
def test_entries_of_another_dtype_or_shape(key, value, error, message):
    with pytest.raises(error, match=f"{key} ?{message}"):
        check_row(seen().set(key, value))


VALUES = [
    ("attention_mask", (1, 4), True, "Row 1 has a real token right of padding at position 4"),
    ("agent_mask", (1, 3), True, "Row 1 has an agent's token on padding at position 3"),
    ("token_reward", (0, 1), 1.0, "Row 0 has a reward on a token that the agent did not write at position 1"),
    ("token_reward", (0, 4), float("nan"), "Row 0 has a reward that is not finite at position 4"),
    ("agent_mask", (1, 0), True, "Row 1 has an agent's token at position 0: a loss needs a token before it"),
    ("tokens", (0, 3), 9, r"Row 0 has a token id out of range at position 3: ids lie in \[0, 9\)"),
]


@pytest.mark.parametrize(("key", "place", "value", "message"), VALUES)
def test_values_that_cannot_be(key, place, value, message):
    with pytest.raises(ValueError, match=message):
        check_row(rows(**{key: (place, value)}), vocab_size=9)


def test_control_tokens_differ():
    control = ControlTokens(5, 4, 3, 2, 1, 0, vocab_size=6)
    assert control.marks_turns
    assert control.ids() == (5, 4, 3, 2, 1, 0)
    assert set(control.forbidden_in_action()) == {5, 3, 2, 1, 0}
    chat = ControlTokens(pad=0, end_of_action=4, vocab_size=9, forbidden=(7, 8))
    assert not chat.marks_turns
    assert chat.ids() == (0, 4)
    assert chat.forbidden_in_action() == (0, 7, 8)
    for ids in ((0, 1, 2, 3, 4, 4), (0, 1, 2)):
        with pytest.raises(ValueError, match="different ids"):
            ControlTokens(*ids)
    below = r"lie in \[0, vocab_size\)"
    for ids, options in (((6, 4, 3, 2, 1, 0), {"vocab_size": 6}), ((5, 4, 3, 2, 1, -2), {})):
        with pytest.raises(ValueError, match=below):
            ControlTokens(*ids, **options)
    with pytest.raises(ValueError, match=below):
        ControlTokens(0, 1, vocab_size=9, forbidden=(9,))
