"""Blocks of text tasks, packed as whole episodes in the order of epochs, and rows of prompts and completions."""

import random
from collections import Counter

import pytest
import torch

from tests.algorithm_distillation.language.conftest import parse_blocks, read_blocks
from tests.algorithm_distillation.language.test_records import episode_of, many
from tests.data.chat_templates import EXACT, tokenizer_of
from torchrl_lang.algorithm_distillation.language import BlockTemplate, Quantizer, TextRecord, pack_blocks, split_texts
from torchrl_lang.algorithm_distillation.language.block_rows import completion_rows
from torchrl_lang.algorithm_distillation.language.records import group_episodes, in_epoch_order
from torchrl_lang.algorithm_distillation.language.run_recorder import run_records
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.schema import check_row
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, RowFormat, Turn, from_row, to_rows, word_tokenizer

WORDS = ["good", "bad", "film ", "\n", " ", "Prompt", ": ", "Reward", "0.5", "é"]


def block(query, response, reward):
    return TextRecord(query=query, response=response, reward=reward)


def plain(record):
    """A record as it is read from a text, without run and epoch."""
    return block(record.query, record.response, record.reward)


def records(count, seed=0, runs=("run-a", "run-b"), epochs=12, length=6):
    draw = random.Random(seed)

    def text():
        return "".join(draw.choice(WORDS[:9]) for _ in range(draw.randrange(length)))

    return [
        TextRecord(
            query=text(),
            response=text(),
            reward=draw.random(),
            epoch=draw.randrange(epochs),
            run=draw.choice(runs),
        )
        for _ in range(count)
    ]


@pytest.fixture
def template():
    return BlockTemplate()


@pytest.fixture
def tokenizer(template):
    return word_tokenizer([template.write(block("good bad film", "", 0.0))], symbols=template.vocabulary())


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_texts_of_random_blocks_are_read_as_they_were(template):
    blocks = [plain(each) for each in records(500)]
    assert parse_blocks(template, "".join(map(template.write, blocks))) == blocks


@pytest.mark.parametrize("text", ["a\nCompletion: b", "a\nReward: 1\n\n", "\nReward: 1\n\nPrompt: \nCompletion: c"])
def test_texts_with_lines_of_the_template_are_refused_or_read(template, text):
    """Each is read exactly, or refused; as a prompt and as a completion."""
    for one in (block(text, "r", 1.0), block("q", text, 1.0)):
        try:
            written = template.write(one)
        except ValueError as error:
            assert "contain lines of the template" in str(error)  # noqa: PT017
        else:
            assert parse_blocks(template, written * 2) == [one, one]
    with pytest.raises(ValueError, match="contain lines of the template"):
        template.write(block("a\nCompletion: b", "r", 1.0))


def test_a_pattern_of_your_own():
    for pattern in ("{query} {response} {reward}", "{response}\n{query} {reward}\n"):
        with pytest.raises(ValueError, match="A pattern has"):
            BlockTemplate(pattern=pattern)
    own = BlockTemplate(pattern="Q {query}\nA {response}\n= {reward}\n")
    assert parse_blocks(own, own.write(block("a", "b", 0.5)) * 2) == [block("a", "b", 0.5)] * 2
    assert own.prompt("a") == "Q a\nA"


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


def test_blocks_that_do_not_fit_are_reported(template, tokenizer):
    every = records(30)
    long = TextRecord(query="x" * 300, response="y", reward=1.0, epoch=3, run="run-a")
    with pytest.warns(UserWarning, match="1 of 31 blocks are of episodes longer than row_length=200 tokens"):
        rows, left_out = pack_blocks([*every[:7], long, *every[7:]], template, tokenizer, 200)
    assert left_out == [long]
    assert sum(len(read_blocks(row, template, tokenizer)) for row in rows) == 30
    with pytest.raises(ValueError, match="No episode of 1 blocks fits a row of 200 tokens"):
        pack_blocks([long], template, tokenizer, 200)


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_length", [150, 200, 500])
def test_rows_hold_whole_episodes_in_the_order_of_epochs(row_length):
    records, template = many(), BlockTemplate()
    tokenizer = word_tokenizer([], symbols=template.vocabulary())
    length = {
        episode_of(episode[0]): sum(
            len(tokenizer.encode(text)) for each in episode for text, _ in template.segments(each)
        )
        for episode in group_episodes(records)
    }
    expected, used = [], 0  # a plain loop over episodes
    for run in in_epoch_order(records):
        used = row_length
        for episode in group_episodes(run):
            size = length[episode_of(episode[0])]
            if size + 1 > row_length:
                continue
            if used + size > row_length:
                expected, used = [*expected, []], 1
            expected[-1] += [each.query for each in episode]
            used += size
    if max(length.values()) >= row_length:
        with pytest.warns(UserWarning, match="blocks are of episodes longer than"):
            packed = pack_blocks(records, template, tokenizer, row_length)
    else:
        packed = pack_blocks(records, template, tokenizer, row_length)
    found = [[each.query for each in read_blocks(row, template, tokenizer)] for row in packed.rows]
    assert found == expected
    whole = Counter(map(episode_of, records))
    assert all(whole[episode_of(each)] == Counter(map(episode_of, packed.left_out))[episode_of(each)]
               for each in packed.left_out)  # fmt: skip
    assert sum(map(len, found)) + len(packed.left_out) == len(records)


def test_records_of_several_environments_by_turns_are_whole_episodes():
    """Which step together, so that the episodes of a log take turns."""
    records, template = many(), BlockTemplate()
    tokenizer = word_tokenizer([], symbols=template.vocabulary())
    mixed = sorted(records, key=lambda record: int(record.query.split()[-1]))
    found = pack_blocks(mixed, template, tokenizer, 500)
    assert (found.rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    assert split_texts(mixed) == split_texts(records)


def test_episodes_with_lines_of_the_template_are_left_out_whole():
    template = BlockTemplate()
    tokenizer = word_tokenizer([], symbols=[*template.vocabulary(), "\n"])
    records = many(epochs=2)
    forged = TextRecord(query="q\nCompletion: r", response="x", reward=0.5, run="a", epoch=1, episode=99)
    beside = TextRecord(query="before", response="x", reward=0.5, run="a", epoch=1, episode=99)
    message = rf"2 of {len(records) + 2} blocks .* lines of the template"
    with pytest.warns(UserWarning, match=message):
        rows, left_out = pack_blocks([*records, beside, forged], template, tokenizer, 500)
    assert left_out == [beside, forged]
    assert (rows == pack_blocks(records, template, tokenizer, 500).rows).all()
    with pytest.raises(ValueError, match=r"No episode of 1 blocks"):
        pack_blocks([forged], template, tokenizer, 500)
    with pytest.raises(ValueError, match=r"no word for 0\.5"):  # no reason to leave an episode out
        pack_blocks([forged], BlockTemplate(Quantizer([0, 1])), tokenizer, 500)


# -- one row for each record -------------------------------------------------------------------------------------------


def test_completions_as_episodes():
    tokenizer = CharTokenizer.from_alphabet("abc")
    first = TextRecord(query="ab", response="c", reward=-0.25, epoch=4)
    rows = completion_rows([first, TextRecord(query="c", response="ab", reward=0.75)], tokenizer, 8)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    episode = from_row(rows[1], tokenizer)
    assert [(turn.text, turn.reward) for turn in episode.turns] == [("c", None), ("ab", 0.75)]
    assert rows["reward"].tolist() == [[-0.25], [0.75]]
    assert rows["episode"].tolist() == [4, 0]
    assert "token_log_prob" not in rows.keys()


def test_log_probabilities_are_on_the_tokens_of_the_completion():
    tokenizer = CharTokenizer.from_alphabet("abc")
    every = [
        TextRecord(query="a", response="bc", reward=1.0, response_tokens=(1, 2), log_probs=(-1.0, -2.0)),
        TextRecord(query="aaa", response="c", reward=1.0, response_tokens=(2,), log_probs=(-3.0,)),
    ]
    rows = completion_rows(every, tokenizer, 8)
    assert rows["token_log_prob"].tolist() == [[0, 0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, 0, -3, 0, 0]]


def played_records(episodes, tokenizer, *, log_probs=False):
    """Records of what was played."""
    rows = to_rows(episodes, tokenizer, 24)
    if log_probs:
        rows["token_log_prob"] = torch.where(rows["agent_mask"], -torch.arange(24.0), 0.0)
    return list(run_records(rows, tokenizer, epoch=2, run="ppo"))


def test_recorded_turns_as_completions():
    """By hand: the queries and responses of run_records have control tokens, which a row has on its own."""
    tokenizer = CharTokenizer.from_alphabet("abcdef")
    control = tokenizer.control
    first = [Turn("ab"), Turn("c", reward=1.0), Turn("f"), Turn("e"), Turn("ba", reward=-0.5), Turn("d")]
    played = [Episode(first, terminated=True), Episode([Turn("e", reward=0.25)], terminated=True)]
    every = played_records(played, tokenizer, log_probs=True)
    rows = completion_rows(every, tokenizer, 10)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    begin, state, end, over = control.begin_state, control.end_of_state, control.end_of_action, control.end_of_dialogue
    expected = [
        [begin, 0, 1, state, 2, end, over],
        [begin, 5, 4, state, 1, 0, end, over],
        [begin, state, 4, end, over],
    ]
    assert [row["tokens"][row["attention_mask"]].tolist() for row in rows] == expected
    assert [row["agent_mask"].nonzero().flatten().tolist() for row in rows] == [[4, 5], [4, 5, 6], [2, 3]]
    for row, record in zip(rows, every, strict=True):
        assert row["token_log_prob"][row["agent_mask"]].tolist() == list(record.log_probs)
        assert not row["token_log_prob"][~row["agent_mask"]].any()
    assert rows["token_reward"].sum(-1).tolist() == [1.0, -0.5, 0.25]


def test_recorded_responses_that_were_cut_off_have_no_end_of_the_model():
    tokenizer = CharTokenizer.from_alphabet("abcdef")
    begins = tokenizer.control.begin_state
    cut = [Turn("a"), Turn("bc", reward=0.5, closed=False), Turn("d"), Turn("e", reward=1.0)]
    every = played_records([Episode(cut, terminated=True)], tokenizer, log_probs=True)
    for records in (every, every[:1]):  # a run may have no other response
        rows = completion_rows(records, tokenizer, 10)
        assert [(turn.text, turn.closed) for turn in from_row(rows[0], tokenizer).turns] == [("a", True), ("bc", False)]
        assert rows["agent_mask"][0].nonzero().flatten().tolist() == [3, 4]
        assert rows["token_reward"][0].nonzero().flatten().tolist() == [4]
        assert rows["token_log_prob"][0].tolist() == [0, 0, 0, -3, -4, 0, 0, 0, 0, 0]
    both = completion_rows(every, tokenizer, 10)
    assert both["tokens"][1][:4].tolist() == [begins, 3, tokenizer.control.end_of_state, 4]
    assert from_row(both[1], tokenizer).turns[1].closed


def test_recorded_turns_of_a_chat_as_completions():
    """The strings of the template are part of a prompt, special tokens included."""
    source = tokenizer_of(EXACT["chatml"])
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Complete."))
    rows = to_rows([Episode([Turn("ab"), Turn("c", reward=1.0)], terminated=True)], tokenizer, 80)
    (record,) = list(run_records(rows, tokenizer, epoch=0, run="ppo"))
    again = completion_rows([record], tokenizer, 80)
    length = len(record.query_tokens + record.response_tokens)
    assert again["tokens"][0, :length].tolist() == rows["tokens"][0, :length].tolist()
    assert torch.equal(again["agent_mask"], rows["agent_mask"])
    assert torch.equal(again["token_reward"], rows["token_reward"])
