"""Rewards of tokens from a table: scale and shift, ids that are not in it, files, and rows."""

from __future__ import annotations

import json
import math

import pytest
import torch

from torchrl_lang._files import FileError
from torchrl_lang.text import CharTokenizer, Episode, TokenRewardTable, Turn, to_rows, token_frequencies

TOKENIZER = CharTokenizer.from_alphabet("abc")
EPISODES = [Episode([Turn("ab", 1.0), Turn("bb"), Turn("c", -2.0)], True), Episode([Turn("cab", 0.0)], True)]


def test_values_by_hand():
    table = TokenRewardTable({0: 0.5, 2: -1.0}, scale=20.0, shift=-1.0)
    assert table([0, 1, 2, 3, 40]) == [9.0, -1.0, -21.0, -1.0, -1.0]
    assert TokenRewardTable({})([0, 7]) == [0.0, 0.0]


def test_rows_get_the_same_rewards_when_they_are_made_and_afterwards():
    table = TokenRewardTable({0: 0.5, 2: -1.0, 4: 0.25}, scale=3.0, shift=0.5)
    plain = to_rows(EPISODES, TOKENIZER, 14)
    before = plain.clone()
    made = to_rows(EPISODES, TOKENIZER, 14, token_reward=table)
    torch.testing.assert_close(table.add_to(plain)["token_reward"], made["token_reward"])
    assert (plain == before).all()
    difference = (made["token_reward"] - plain["token_reward"])[0]
    torch.testing.assert_close(difference[1:4], torch.tensor([2.0, 0.5, 1.25]))  # a, b, the end of the action
    assert not difference[4:7].any()  # the environment's b, b and their end


def test_frequencies_are_shares_of_the_tokens():
    rows = to_rows(EPISODES, TOKENIZER, 14)
    shares = token_frequencies(rows)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[1] == pytest.approx(4 / int(rows["attention_mask"].sum()))
    assert set(token_frequencies(rows, agent_only=True)) == {0, 1, 2, TOKENIZER.control.end_of_action}


def test_numbers_that_are_no_rewards():
    for token, reward in ((-1, 0.5), (0, math.nan)):
        with pytest.raises(ValueError, match=f"got .{token}, "):
            TokenRewardTable({token: reward})


def test_files(tmp_path):
    TokenRewardTable(token_frequencies(to_rows(EPISODES, TOKENIZER, 14))).write(tmp_path / "table.json")
    table = TokenRewardTable.read(tmp_path / "table.json", scale=2.0)
    assert table.table == token_frequencies(to_rows(EPISODES, TOKENIZER, 14))
    bad = [{name: 1.0} for name in ("a", "-1", " 1", "1_0", "\u0661")] + [{"1": value} for value in ("x", True, None)]
    for content in bad:
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with pytest.raises(FileError, match="give a JSON object of numbers"):
            TokenRewardTable.read(tmp_path / "bad.json")
