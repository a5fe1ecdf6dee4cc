"""Plain-Python games whose rows are chats."""

import random

import pytest
import torch

from tests.data.chat_templates import EXACT, chat, chat_tokenizer
from tests.rows import to_row
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TextGameEnv, check_language_env
from torchrl_lang.envs.game_turn import ToolText, without_thoughts
from torchrl_lang.evaluation import GameRecords, format_transcript
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import Turn, from_row

from .helpers import say_after, transcript


class Echo:
    """Answers with what it hears, names of tokens included, for a number of turns that the seed decides."""

    def reset(self, seed):
        self.draw = random.Random(seed)
        self.left = 1 + seed % 4
        return ["", "say <|im_end|> or </s>", "a dog", "  spaces \n\n"][seed % 4]

    def step(self, text):
        self.left -= 1
        last = self.left <= 0
        return ("" if last and self.draw.random() < 0.5 else f"<|im_end|>{text}\n"), float(len(text)), last


def make(name="chatml", game=Echo, n=2, **options):
    options = {"row_length": 160, "action_length": 5, "seed": 0, **options}
    return TextGameEnv(game, chat_tokenizer(EXACT[name]), batch_size=[n], **options)


@pytest.mark.parametrize("name", ["chatml", "mistral"])
def test_the_rules_of_language_environments(name):
    env = make(name)
    check_language_env(env, lambda n: make(name, n=n), utterances=["is it red?", "no", "<think>"])


@pytest.mark.parametrize("name", EXACT)
def test_rows_are_what_the_template_writes(name):
    env = make(name, action_length=8)
    row_format = env.tokenizer.row_format
    td = env.reset(game_seed=torch.tensor([2, 3]))
    chats = [["a dog"], ["  spaces \n\n"]]
    assert [transcript(env, td, row) for row in range(2)] == [row_format.render(chat(*each)) for each in chats]
    said = ["red?", "no"]
    td = say_after(env, td, *said)
    chats = [[*each, text, f"<|im_end|>{text}\n"] for each, text in zip(chats, said, strict=True)]
    assert [transcript(env, td, row) for row in range(2)] == [row_format.render(chat(*each)) for each in chats]
    assert td["reward"].flatten().tolist() == [4.0, 2.0]
    assert td["agent_mask"].sum(-1).tolist() == [len(env.tokenizer.encode_action(text)) + 1 for text in said]


@pytest.mark.parametrize("name", EXACT)
def test_every_row_of_an_environment_comes_back(name):
    """Random tokens as utterances, rows that are cut at their end among them."""
    env = make(name, n=4, row_length=90, max_turns=3)
    rows = rows_from_rollout(env.rollout(24, break_when_any_done=False), unfinished="drop")
    seen = set()
    for row in rows:
        episode = from_row(row, env.tokenizer)
        seen.add((episode.terminated, episode.truncated, episode.cut))
        again = to_row(episode, env.tokenizer, 90)
        for key in (*ROW_KEYS, "terminated", "truncated"):
            assert torch.equal(again[key], row[key]), key
        format_transcript(row, env.tokenizer)
    assert {(True, False, False), (False, True, False), (False, True, True)} & seen
    records = GameRecords.from_rows(rows, env.tokenizer.control)
    assert records.turns.tolist() == [sum(t.by_agent for t in from_row(row, env.tokenizer).turns) for row in rows]


def test_rows_of_a_chat_that_no_environment_continues():
    env, seed = make(n=1), torch.tensor([3])
    rows = say_after(env, env.reset(game_seed=seed), "no").select(*ROW_KEYS)
    assert torch.equal(env.reset(rows.clone(), set_state=True, game_seed=seed)["tokens"], rows["tokens"])
    cut, open_ended = rows.clone(), rows.clone()
    cut["attention_mask"][0, int(rows["attention_mask"].sum()) - 1] = False
    open_ended["tokens"][0, rows["agent_mask"][0].nonzero()[-1]] = env.tokenizer.encode("a")[0]
    for damaged, noun in ((cut, "generation prompt"), (open_ended, "an order of tokens")):
        with pytest.raises(ValueError, match=noun):
            env.reset(damaged, set_state=True, game_seed=seed)


def test_texts_that_do_not_fit():
    class Long:
        def reset(self, seed):
            return "word " * (60 if seed else 1)

        def step(self, text):
            return "word " * 60, 1.0, False

    env = make(game=Long, row_length=64, action_length=4)
    tokenizer = env.tokenizer
    with pytest.warns(UserWarning, match="opens with"):
        td = env.reset(game_seed=torch.tensor([0, 1]))
    real = [row["tokens"][row["attention_mask"]].tolist() for row in td]
    for ids in real:  # an opening that was cut still asks for an answer
        assert ids[-len(tokenizer.prompt_ids) :] == tokenizer.prompt_ids
    assert len(real[1]) == 64 - 4 - 1
    td = say_after(env, td, "a", "a")
    assert td["truncated"].all()
    assert td["attention_mask"].sum(-1).tolist() == [64, 64]
    for row in td:
        episode = from_row(row, tokenizer)
        assert episode.cut
        assert torch.equal(to_row(episode, tokenizer, 64)["tokens"], row["tokens"])
    with pytest.raises(ValueError, match="row_length"):
        make(game=Long, row_length=12, action_length=4)


class Calculator:
    """Answers an expression as a tool, and ends with any other answer."""

    def reset(self, seed):
        return "2 + 3?"

    def step(self, text):
        return (ToolText("5"), 0.0, False) if text == "2+3" else (f"heard {text}", 1.0, True)


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_a_reply_of_a_tool_is_its_message_where_the_template_has_one(name):
    def calculator(n=1):
        return make(name, Calculator, n, row_length=200, action_length=20)

    env = calculator()
    tokenizer = env.tokenizer
    td = say_after(env, env.reset(), "2+3")
    episode = from_row(td[0].exclude("terminated").set("terminated", torch.tensor([False])), tokenizer)
    role = "tool" if name == "chatml" else "user"
    assert episode.turns == (Turn("2 + 3?"), Turn("2+3", 0.0), Turn("5", role=role))
    check_language_env(calculator(2), calculator, utterances=["2+3", "5"])


def test_a_game_gets_an_utterance_without_its_thoughts():
    """But the row keeps them."""
    env = make(game=Calculator, n=1, row_length=200, action_length=30, read=without_thoughts)
    td = say_after(env, env.reset(), "<think>add</think>\n\n2+3")
    td = say_after(env, td, "<think>so 5</think> 5")
    said = ["2 + 3?", "<think>add</think>\n\n2+3", "5", "<think>so 5</think> 5", "heard 5"]
    assert [turn.text for turn in from_row(td[0], env.tokenizer).turns] == said
    answers = {"a": "a", "<think>a</think>b": "b", "a</think> b ": "b", "a<think>b": "a", "<think>a": ""}
    answers |= {"<think>a</think>b<think>c</think>d": "d", "<think>a</think>b<think>c": "b"}
    assert {text: without_thoughts(text) for text in answers} == answers
