"""Blocks of text tasks, packed as whole episodes in the order of epochs, and rows of prompts and completions."""

import random
from contextlib import nullcontext

import pytest
import torch

from tests.algorithm_distillation.language.examples import parse_blocks, read_blocks
from tests.algorithm_distillation.language.test_records import many
from torchrl_lang.algorithm_distillation.language import BlockTemplate, Quantizer, TextRecord, pack_blocks, split_texts
from torchrl_lang.algorithm_distillation.language.records import group_episodes, in_epoch_order
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.text import word_tokenizer

WORDS = ["good", "bad", "film ", "\n", " ", "Prompt", ": ", "Reward", "0.5"]


def records(count):
    draw = random.Random(0)
    texts = ["".join(draw.choices(WORDS, k=draw.randrange(6))) for _ in range(2 * count)]
    return [TextRecord(query=texts[n], response=texts[-n - 1], reward=draw.random()) for n in range(count)]


@pytest.fixture
def template():
    return BlockTemplate()


@pytest.fixture
def tokenizer(template):
    return word_tokenizer([], symbols=[*template.vocabulary(), "\n"])


def test_texts_of_random_blocks_are_read_as_they_were(template):
    assert parse_blocks(template, "".join(map(template.write, records(200)))) == records(200)


@pytest.mark.parametrize("text", ["a\nCompletion: b", "a\nReward: 1\n\n", "\nReward: 1\n\nPrompt: \nCompletion: c"])
def test_texts_with_lines_of_the_template_are_refused_or_read(template, text):
    """Each is read exactly, or refused; as a prompt and as a completion."""
    for one in (TextRecord(query=text, response="r", reward=1.0), TextRecord(query="q", response=text, reward=1.0)):
        if template.can_write(one):
            assert parse_blocks(template, template.write(one) * 2) == [one, one]
        else:
            with pytest.raises(ValueError, match="contain lines of the template"):
                template.write(one)
    assert not template.can_write(TextRecord(query="a\nCompletion: b", response="r", reward=1.0))


def test_completions_are_the_actions(template, tokenizer):
    every = records(20)
    rows, _ = pack_blocks(every, template, tokenizer, 200)
    for row in rows:
        blocks = read_blocks(row, template, tokenizer)
        text = tokenizer.decode(row["tokens"][row["agent_mask"]].tolist())
        assert text == "".join(f" {block.response}\n" for block in blocks)
        rewards = row["token_reward"][row["token_reward"] != 0].tolist()
        assert rewards == pytest.approx([block.reward for block in blocks])
        numbers = tokenizer.decode(row["tokens"][row["token_kind"] == TokenKind.REWARD].tolist()).split()
        assert [float(number) for number in numbers] == [block.reward for block in blocks]
        assert all("\n" in tokenizer.symbols[id] for id in row["tokens"][row["token_reward"] != 0])
    every_token = pack_blocks(every, template, tokenizer, 200, loss_on="all").rows
    assert torch.equal(every_token["agent_mask"][:, 1:], rows["attention_mask"][:, 1:])
    assert not every_token["agent_mask"][:, 0].any()


@pytest.mark.parametrize("row_length", [150, 500])
def test_rows_hold_whole_episodes_in_the_order_of_epochs(row_length, template, tokenizer):
    """Against a plain loop over episodes; the first row length leaves some out."""
    records, expected, out = many(epochs=3), [], []
    for run in in_epoch_order(records):
        used = row_length
        for episode in group_episodes(run):
            size = sum(len(tokenizer.encode(text)) for each in episode for text, _ in template.segments(each))
            if size + 1 > row_length:
                out += episode
                continue
            if used + size > row_length:
                expected, used = [*expected, []], 1
            expected[-1] += [each.query for each in episode]
            used += size
    with pytest.warns(UserWarning, match="blocks are of episodes longer") if out else nullcontext():
        packed = pack_blocks(records, template, tokenizer, row_length)
    assert [[each.query for each in read_blocks(row, template, tokenizer)] for row in packed.rows] == expected
    assert packed.left_out == out
    assert bool(out) == (row_length == 150)


def test_episodes_of_environments_that_take_turns_in_a_log_are_whole(template, tokenizer):
    records = many(epochs=3)
    mixed = sorted(records, key=lambda record: int(record.query.split()[-1]))
    found = pack_blocks(mixed, template, tokenizer, 500)
    assert (found.rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    assert split_texts(mixed) == split_texts(records)


def test_episodes_with_lines_of_the_template_are_left_out_whole(template, tokenizer):
    records = many(epochs=2)
    forged = TextRecord(query="q\nCompletion: r", response="x", reward=0.5, run="a", epoch=1, episode=99)
    beside = TextRecord(query="before", response="x", reward=0.5, run="a", epoch=1, episode=99)
    message = rf"2 of {len(records) + 2} blocks .* lines of the template"
    with pytest.warns(UserWarning, match=message):
        rows, left_out = pack_blocks([*records, beside, forged], template, tokenizer, 500)
    assert left_out == [beside, forged]
    assert (rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    for alone in (forged, TextRecord(query="x" * 500, response="y", reward=1.0)):
        with pytest.raises(ValueError, match="No episode of 1 blocks fits a row of 500 tokens"):
            pack_blocks([alone], template, tokenizer, 500)
    with pytest.raises(ValueError, match=r"no word for 0\.5"):  # no reason to leave an episode out
        pack_blocks([forged], BlockTemplate(Quantizer([0, 1])), tokenizer, 500)
