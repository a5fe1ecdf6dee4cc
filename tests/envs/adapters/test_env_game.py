"""A row of a language environment as a text game, text games as TRL's environments, and GEM's interface."""

import inspect
import random

import numpy as np
import pytest
import torch

from tests.envs.conftest import WORDS
from tests.envs.helpers import check_game
from torchrl_lang.envs import EnvGame, GemGame, WordleEnv, trl_environment


def wordle_game(**options):
    return EnvGame(WordleEnv(WORDS, batch_size=[1]), invalid_reply="no", invalid_reward=-2.0, **options)


def test_the_rules_of_language_environments():
    check_game(wordle_game, *WORDS, "zzzzz", "speedy", "a.")


def test_the_game_is_the_environments():
    game, env = wordle_game(), WordleEnv(WORDS, batch_size=[1])
    state = torch.get_rng_state()
    for seed in range(4):
        env._set_seed(seed)
        td = env.reset()
        assert game.reset(seed) == ""
        for word in ("crane", "speed", "geese"):
            action = torch.tensor([[*env.tokenizer.encode(word), env.tokenizer.control.end_of_action]])
            td = env.step(td.set("action", action))["next"]
            reply, *turn, _ = game.step(word)
            assert turn == [td["reward"].item(), td["terminated"].item(), td["truncated"].item()]
            tokens = env.tokenizer.decode(td["tokens"][0][td["attention_mask"][0]])
            assert tokens.removesuffix("</eod>").removesuffix("</s>").endswith(f"{word}</a>{reply}")
            if td["done"].any():
                break
    assert torch.equal(torch.get_rng_state(), state)


def test_utterances_that_are_no_actions():
    game = wordle_game(observe=str.upper)
    game.reset(0)
    for text in ("cranes", "CRANE", "cr ne"):  # too long, or with letters that the tokenizer has not
        assert game.step(text) == ("no", -2.0, False, False, {})
    assert game.step("crane")[0].startswith(("<G>", "<Y>", "<B>"))


class Count:
    """Two turns; the reply is the text's length, the reward a half of it."""

    def reset(self, seed):
        self.left = 2
        return "" if seed == 1 else f"game {seed}"

    def step(self, text):
        self.left -= 1
        return str(len(text)) if self.left else "", len(text) / 2, self.left == 0


def test_the_contract_of_trl():
    """As GRPOTrainer finds tools: public functions of the class other than reset and get_reward."""
    from transformers.utils import get_json_schema

    make = trl_environment(Count, method="write", doc="Write a word.", argument_doc="the word")
    env = make()
    public = [name for name, _ in inspect.getmembers(make, inspect.isfunction) if not name.startswith("_")]
    assert sorted(public) == ["get_reward", "reset", "write"]
    schema = get_json_schema(env.write)["function"]
    assert (schema["name"], schema["description"]) == ("write", "Write a word.")
    assert schema["parameters"]["properties"] == {"text": {"type": "string", "description": "the word"}}
    assert env.reset(prompt=[], seed=3) == "game 3"
    assert env.write(text="abc") == "3"
    assert (env.get_reward(), env.reward) == (1.5, 1.5)
    assert env.write("a") == "The game is over."
    assert env.get_reward() == 2.0
    assert env.write("abc") == "The game is over."
    assert env.get_reward() == 2.0
    assert env.reset(seed=1) is None
    assert env.get_reward() == 0.0
    assert make() is not env


def test_a_game_that_breaks_its_contract_is_an_error(monkeypatch):
    monkeypatch.setattr(Count, "step", lambda self, text: (text, float("nan"), False))
    env = trl_environment(Count)()
    env.reset(seed=5)
    with pytest.raises(TypeError, match=r"seed 5, turn 1\) returned nan as its reward"):
        env.play("a")


class Sums:
    """Sums to add, with the random streams and flags of GEM: single-turn, or two turns with a suffix."""

    def __init__(self, turns=1):
        self.turns = turns

    def reset(self, seed=None):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.left = self.turns
        return self.ask(), {"suffix": "answer?"}

    def ask(self):
        self.numbers = random.randrange(10), int(np.random.randint(10))  # noqa: NPY002
        return "{} and {}".format(*self.numbers)

    def step(self, action):
        self.left -= 1
        reward = float(action == str(sum(self.numbers)))
        text = self.ask() if self.left else "<\N{FULLWIDTH VERTICAL LINE}TERMINAL_STATE\N{FULLWIDTH VERTICAL LINE}>"
        return text, reward, self.left == 0, self.left == 0, {"suffix": "answer?", "prefix": "a "[: 2 * self.left]}


def test_the_rules_with_gem():
    check_game(lambda: GemGame(Sums(2)), "3", "10", "a", row_length=80, action_length=4)


def test_texts_rewards_and_flags():
    game = GemGame(Sums(2), observe=lambda text: text.replace(" and ", " "))
    python = random.getstate()
    numbers = game.reset(5).removesuffix("\nanswer?").split()
    assert random.getstate() == python
    reply, reward, terminated, truncated, _ = game.step(str(sum(map(int, numbers))))
    assert reply.startswith("a ")
    assert reply.endswith("\nanswer?")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert game.step("no")[:4] == ("", 0.0, True, False)  # GEM reports the end as truncated, too
    with pytest.raises(TypeError, match="NoneType"):
        GemGame(Sums(), observe=lambda text: None).reset(0)
