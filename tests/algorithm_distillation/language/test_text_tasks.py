"""Text tasks: records on disk, logs of runs, blocks and their rows."""

import json
import random

import pytest
import torch

from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation.language import (
    Bins,
    Block,
    BlockTemplate,
    TextHistory,
    TokenKind,
    completion_rows,
    in_epoch_order,
    pack_blocks,
    read_blocks,
    read_run_logs,
    read_text_history,
    write_text_history,
)
from torchrl_lang.schema import check_row
from torchrl_lang.text import CharTokenizer, from_row, word_tokenizer

WORDS = ["good", "bad", "film ", "\n", " ", "Prompt", ": ", "Reward", "0.5", "é"]


def records(count, seed=0, runs=("run-a", "run-b"), epochs=12, length=6):
    draw = random.Random(seed)

    def text():
        return "".join(draw.choice(WORDS[:9]) for _ in range(draw.randrange(length)))

    return [
        TextHistory(
            query=text(),
            response=text(),
            rewards=(0.0, draw.random()),
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
    return word_tokenizer([template.write(Block("good bad film", "", 0.0))], symbols=template.vocabulary())


# -- records -----------------------------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(tmp_path):
    every = [*records(50), TextHistory(query="é\u2028", response='"', rewards=(1 / 3,), log_probs=(-0.1,), run="x")]
    every.append(TextHistory(query="", response="b", rewards=(1, 2), query_tokens=(3,), response_tokens=(4, 5)))
    write_text_history(tmp_path / "history.jsonl", every)
    assert read_text_history(tmp_path / "history.jsonl") == (every, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": 3}, "'query' must be of type str, got 3"),
        ({"rewards": []}, "at least one reward"),
        ({"rewards": None}, "'rewards' must be of type list"),
        ({"rewards": ["a"]}, "each of 'rewards' must be a finite number"),
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": True}, "'epoch' must be of type int"),
        ({"response_tokens": [1.5]}, "'response_tokens' must be a list of ids"),
        ({"response_tokens": [1], "log_probs": [-1, -2]}, "got 2 for 1"),
        ({"reward": 1}, "unknown keys"),
    ],
)
def test_bad_records_name_the_line(tmp_path, change, message):
    path = tmp_path / "history.jsonl"
    good = {"query": "q", "response": "r", "rewards": [0.5]}
    path.write_text("\n".join(json.dumps(each) for each in (good, {**good, **change})))
    with pytest.raises(FileError, match=r"1 bad line \(line 2: .*") as error:
        read_text_history(path)
    assert message in str(error.value)
    with pytest.warns(UserWarning, match="1 bad line"):
        found, bad = read_text_history(path, on_error="skip")
    assert len(found) == 1
    assert bad[0].line == 2


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(FileError, match="holds no record"):
        read_text_history(tmp_path / "empty")


# -- logs of runs ------------------------------------------------------------------------------------------------------


PADDED = {
    "query_tensor": [10, 11],
    "response_tensor": [20, 21, 50, 50, 50, 50],
    "logprobs": [-0.1, -0.2, -0.3],
    "values": [0.0, 0.0, 0.0],
    "rewards": [-0.01, -0.02, 0.9],
    "query_text": "q",
}
"""A rollout whose completion ended before the longest of its batch; 50 ends it and pads it."""


def write_padded(folder, **change):
    write_run(folder, "run-a", {})
    (folder / "run-a" / "epoch-1.json").write_text(json.dumps([{**PADDED, **change}]))


def test_padding_of_a_log_is_cut(tmp_path):
    write_padded(tmp_path)
    (record,) = read_run_logs(tmp_path, lambda ids: "-".join(map(str, ids))).records
    assert (record.response, record.response_tokens) == ("20-21-50", (20, 21, 50))
    assert record.log_probs == (-0.1, -0.2, -0.3)
    assert record.rewards == (-0.01, -0.02, 0.9)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"response_tensor": [20, 21, 50, 50, 50, 51]}, "3 for 6"),
        ({"rewards": [0.0, 0.9]}, "3 for 6"),
        ({"response_tensor": [20, 21]}, "3 for 2"),
    ],
)
def test_logs_that_are_not_padded_but_wrong(tmp_path, change, found):
    write_padded(tmp_path, response_text="r", **change)
    with pytest.raises(FileError, match=rf"bad rollout 0 \(.* one of log_probs for each .*, got {found}"):
        read_run_logs(tmp_path)


def write_run(folder, name, epochs, texts=True):
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({"lr": 1e-4, "name": name}))
    for number, rollouts in epochs.items():
        content = []
        for place in range(rollouts):
            one = {"query_tensor": [place], "response_tensor": [7, 8], "logprobs": [-1.0, -2.0], "values": [0.0, 0.0]}
            one |= {"rewards": [-0.01, 0.5]}
            one |= {"query_text": f"q{place}", "response_text": f"{name} {number}"} if texts else {}
            content.append(one)
        (folder / name / f"epoch-{number}.json").write_text(json.dumps(content, indent=2))


def test_logs_are_read_in_the_order_of_numbers(tmp_path):
    """The names 9, 10 and 100.5 sort differently as texts."""
    write_run(tmp_path, "run-b", {"100.5": 1, "9": 2, "10": 1})
    write_run(tmp_path, "run-a", {"1": 1})
    (tmp_path / "notes.txt").write_text("not a run")
    logs = read_run_logs(tmp_path)
    found = [(each.run, each.epoch, each.response, each.query) for each in logs.records]
    assert found == [
        ("run-a", 0, "run-a 1", "q0"),
        ("run-b", 0, "run-b 9", "q0"),
        ("run-b", 0, "run-b 9", "q1"),
        ("run-b", 1, "run-b 10", "q0"),
        ("run-b", 2, "run-b 100.5", "q0"),
    ]
    first = logs.records[0]
    assert (first.reward, first.rewards, first.log_probs) == (0.5, (-0.01, 0.5), (-1.0, -2.0))
    assert (first.query_tokens, first.response_tokens) == ((0,), (7, 8))
    assert logs.configs["run-b"] == {"lr": 1e-4, "name": "run-b"}


def test_logs_without_texts_need_a_decoder(tmp_path):
    write_run(tmp_path, "run-a", {"1": 1}, texts=False)
    with pytest.raises(FileError, match=r"bad rollout 0 \(it has no query_text: decode the logs first"):
        read_run_logs(tmp_path)
    (record,) = read_run_logs(tmp_path, lambda ids: "-".join(map(str, ids))).records
    assert (record.query, record.response) == ("0", "7-8")


def test_damaged_logs_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder run-"):
        read_run_logs(tmp_path)
    write_run(tmp_path, "run-a", {"1": 1})
    (tmp_path / "run-a" / "epoch.json").write_text("[]")
    with pytest.raises(FileError, match="has no number at the end of its name"):
        read_run_logs(tmp_path)
    (tmp_path / "run-a" / "epoch.json").rename(tmp_path / "run-a" / "epoch-2.json")
    assert len(read_run_logs(tmp_path).records) == 1
    (tmp_path / "run-a" / "epoch-2.json").write_text('[{"query_text": "q", "response_text": "r"}]')
    with pytest.raises(FileError, match=r"epoch-2.json holds a bad rollout 0 \('rewards' must be"):
        read_run_logs(tmp_path)
    (tmp_path / "run-a" / "config.json").unlink()
    with pytest.raises(FileError, match=r"config.json is missing"):
        read_run_logs(tmp_path)


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_blocks_are_those_of_the_sentiment_task(template):
    assert (
        template.write(Block("The film", "was good", 0.97))
        == "Prompt: The film\nCompletion: was good\nReward: 0.97\n\n"
    )


def test_texts_of_random_blocks_are_read_as_they_were(template):
    blocks = [Block(each.query, each.response, each.reward) for each in records(500)]
    assert template.parse("".join(map(template.write, blocks))) == blocks


@pytest.mark.parametrize("text", ["a\nCompletion: b", "a\nReward: 1\n\n", "\nReward: 1\n\nPrompt: \nCompletion: c"])
def test_texts_with_lines_of_the_template_are_refused_or_read(template, text):
    """Each is read exactly, or refused; as a prompt and as a completion."""
    for block in (Block(text, "r", 1.0), Block("q", text, 1.0)):
        try:
            written = template.write(block)
        except ValueError as error:
            assert "contain lines of the template" in str(error)  # noqa: PT017
        else:
            assert template.parse(written * 2) == [block, block]
    with pytest.raises(ValueError, match="contain lines of the template"):
        template.write(Block("a\nCompletion: b", "r", 1.0))


def test_what_is_no_block_is_named(template):
    with pytest.raises(ValueError, match="Character 37 of the text begins no block: 'Prompt: q'"):
        template.parse(template.write(Block("a", "b", 0.5)) + "Prompt: q")
    with pytest.raises(ValueError, match="have no line breaks"):
        BlockTemplate(prompt_name="a\n")


def test_packed_rows_hold_all_blocks_in_the_order_of_epochs(template, tokenizer):
    every = records(60)
    rows, left_out = pack_blocks(every, template, tokenizer, 200)
    assert not left_out
    check_row(rows, vocab_size=tokenizer.vocab_size)
    found = [block for row in rows for block in read_blocks(row, template, tokenizer)]
    assert found == [Block(each.query, each.response, each.reward) for run in in_epoch_order(every) for each in run]
    runs = {(each.query, each.response, each.reward): each.run for each in every}
    assert all(len({runs[tuple(block)] for block in read_blocks(row, template, tokenizer)}) == 1 for row in rows)


def test_packing_is_that_of_a_plain_loop(template, tokenizer):
    every = records(60)
    expected = []
    for run in in_epoch_order(every):
        used = 200
        for each in run:
            pieces = template.segments(Block(each.query, each.response, each.reward))
            length = sum(len(tokenizer.encode(piece.text)) for piece in pieces)
            if used + length > 200:
                expected.append(0)
                used = 1
            used += length
            expected[-1] += 1
    rows, _ = pack_blocks(every, template, tokenizer, 200)
    assert [len(read_blocks(row, template, tokenizer)) for row in rows] == expected


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
    long = TextHistory(query="x" * 300, response="y", rewards=(1.0,), epoch=3, run="run-a")
    with pytest.warns(UserWarning, match="1 of 31 blocks are of episodes longer than row_length=200 tokens"):
        rows, left_out = pack_blocks([*every[:7], long, *every[7:]], template, tokenizer, 200)
    assert left_out == [long]
    assert sum(len(read_blocks(row, template, tokenizer)) for row in rows) == 30
    with pytest.raises(ValueError, match="No episode of 1 blocks fits a row of 200 tokens"):
        pack_blocks([long], template, tokenizer, 200)


def test_a_block_may_fill_its_row(template, tokenizer):
    record = records(1)[0]
    block = template.write(Block(record.query, record.response, record.reward))
    pieces = template.segments(Block(record.query, record.response, record.reward))
    length = sum(len(tokenizer.encode(piece.text)) for piece in pieces)
    rows, _ = pack_blocks([record], template, tokenizer, length + 1)
    assert rows["attention_mask"].all()
    assert tokenizer.decode(rows["tokens"][0, 1:].tolist()) == block
    with pytest.raises(ValueError, match="No episode of 1 blocks fits"):
        pack_blocks([record], template, tokenizer, length)


def test_rewards_are_quantised():
    template = BlockTemplate(Bins(0, 1, 4))
    tokenizer = word_tokenizer(["Prompt"], symbols=template.vocabulary())
    rows, _ = pack_blocks([TextHistory(query="q", response="r", rewards=(0.9,))], template, tokenizer, 64)
    assert read_blocks(rows[0], template, tokenizer) == [Block("q", "r", 0.875)]
    assert (rows["token_kind"] == TokenKind.REWARD).sum() == 1


# -- one row for each record -------------------------------------------------------------------------------------------


def test_completions_as_episodes():
    tokenizer = CharTokenizer.from_alphabet("abc")
    first = TextHistory(query="ab", response="c", rewards=(-0.25,), epoch=4)
    rows = completion_rows([first, TextHistory(query="c", response="ab", rewards=(0.1, 0.75))], tokenizer, 8)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    episode = from_row(rows[1], tokenizer)
    assert [(turn.text, turn.reward) for turn in episode.turns] == [("c", None), ("ab", 0.75)]
    assert rows["reward"].tolist() == [[-0.25], [0.75]]
    assert rows["episode"].tolist() == [4, 0]
    assert "token_log_prob" not in rows.keys()


def test_log_probabilities_are_on_the_tokens_of_the_completion():
    tokenizer = CharTokenizer.from_alphabet("abc")
    every = [
        TextHistory(query="a", response="bc", rewards=(1.0,), response_tokens=(1, 2), log_probs=(-1.0, -2.0)),
        TextHistory(query="aaa", response="c", rewards=(1.0,), response_tokens=(2,), log_probs=(-3.0,)),
    ]
    rows = completion_rows(every, tokenizer, 8)
    assert rows["token_log_prob"].tolist() == [[0, 0, 0, -1, -2, 0, 0, 0], [0, 0, 0, 0, 0, -3, 0, 0]]
