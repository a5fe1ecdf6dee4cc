"""Recorded runs as prompts and completions: the rows have each token once, on the side that wrote it."""

import torch

from tests.data.chat_templates import EXACT, tokenizer_of
from torchrl_lang.algorithm_distillation import run_records
from torchrl_lang.algorithm_distillation.language import completion_rows, run_texts
from torchrl_lang.schema import check_row
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, RowFormat, Turn, from_row, to_rows


def recorded(episodes, tokenizer, *, log_probs=False):
    """Text histories of what was played."""
    rows = to_rows(episodes, tokenizer, 24)
    if log_probs:
        rows["token_log_prob"] = torch.where(rows["agent_mask"], -torch.arange(24.0), 0.0)
    return run_texts(list(run_records(rows, tokenizer, epoch=2, run="ppo")))


def test_recorded_turns_as_completions():
    """By hand: the queries and responses of run_records have control tokens, which a row has on its own."""
    tokenizer = CharTokenizer.from_alphabet("abcdef")
    control = tokenizer.control
    first = [Turn("ab"), Turn("c", reward=1.0), Turn("f"), Turn("e"), Turn("ba", reward=-0.5), Turn("d")]
    played = [Episode(first, terminated=True), Episode([Turn("e", reward=0.25)], terminated=True)]
    every = recorded(played, tokenizer, log_probs=True)
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
    every = recorded([Episode(cut, terminated=True)], tokenizer, log_probs=True)
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
    (record,) = run_texts(list(run_records(rows, tokenizer, epoch=0, run="ppo")))
    again = completion_rows([record], tokenizer, 80)
    length = len(record.query_tokens + record.response_tokens)
    assert again["tokens"][0, :length].tolist() == rows["tokens"][0, :length].tolist()
    assert torch.equal(again["agent_mask"], rows["agent_mask"])
    assert torch.equal(again["token_reward"], rows["token_reward"])
