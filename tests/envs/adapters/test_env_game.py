"""A row of a language environment as a text game, and text games as TRL's environments."""

import inspect

import pytest
import torch

from tests.envs.conftest import WORDS
from tests.envs.helpers import check_game
from torchrl_lang.envs import EnvGame, WordleEnv, trl_environment


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


def test_a_game_that_breaks_its_contract_is_an_error():
    class Broken(Count):
        def step(self, text):
            return text, float("nan"), False

    env = trl_environment(Broken)()
    env.reset(seed=5)
    with pytest.raises(TypeError, match=r"seed 5, turn 1\) returned nan as its reward"):
        env.play("a")
