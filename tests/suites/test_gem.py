"""GEM and reasoning-gym as they are installed."""

from __future__ import annotations

import random

import pytest
import torch

from tests.envs.helpers import say_after
from torchrl_lang.envs import GemGame, TextGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer, from_row

gem = pytest.importorskip("gem", reason="gem-llm is not installed: make test-suites runs these tests")

LETTERS = CharTokenizer.from_alphabet("".join(map(chr, range(32, 127))) + "\n")


def boxed(text):
    return f"\\boxed{{{text}}}"


def make_env(name, batch_size=(2,), row_length=2000, **options):
    def make():
        return GemGame(gem.make(name, **options), act=boxed)

    return TextGameEnv(make, LETTERS, row_length=row_length, action_length=12, batch_size=batch_size, seed=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("rg:leg_counting", ["12", "x"]), ("rg:chain_sum", ["3"]), ("game:GuessTheNumber-v0-easy", ["1", "5", "x"])],
)
def test_the_rules_of_language_environments(name, words):
    check_language_env(make_env(name), lambda n: make_env(name, [n]), utterances=words)


def test_a_task_of_reasoning_gym():
    env = make_env("rg:leg_counting", [1])
    question = from_row(env.reset(game_seed=torch.tensor([7]))[0], LETTERS).turns[0].text
    assert question.startswith("Your task is to count how many legs")
    answer = env._games[0].env.unwrapped.data["answer"]
    td = say_after(env, env.reset(game_seed=torch.tensor([7])), answer)
    assert td["reward"].item() == 1.0
    assert td["terminated"].item()
    assert not td["truncated"].item()
    assert LETTERS.decode(td["tokens"][0][td["attention_mask"][0]]).endswith(f"{answer}</a></eod>")
    wrong = say_after(env, env.reset(game_seed=torch.tensor([7])), f"{answer}0")
    assert wrong["reward"].item() < 1


def test_a_seed_asks_the_same_question_however_many_were_asked():
    game = GemGame(gem.make("rg:chain_sum", size=3))
    first = [game.reset(seed) for seed in range(8)]
    assert [game.reset(seed) for seed in range(8)] == first
    assert 1 < len(set(first)) <= 3


def test_a_game_of_turns_with_suffixes():
    game = GemGame(gem.make("game:GuessTheNumber-v0-easy"))
    state = random.getstate()
    assert game.reset(3).endswith("to start the game.\nEnter your next guess.")
    reply, reward, terminated, truncated, _ = game.step(boxed("3"))
    assert reply.endswith("higher than 3.\nEnter your next guess.")
    assert (reward, terminated, truncated) == (0.0, False, False)
    reply, reward, terminated, truncated, _ = game.step("foo")
    assert reply == "At turn 2, you did not provide a valid guess."
    assert (reward, terminated, truncated) == (-0.1, True, False)
    assert random.getstate() == state


def test_all_tasks_of_reasoning_gym_that_can_be_made_begin_and_end():
    names = [name for name in gem.envs.registration.ENV_REGISTRY if name.startswith("rg:")]
    failed = {}
    for name in names:
        try:
            game = GemGame(gem.make(name, size=2), act=boxed)
            question = game.reset(1)
            reply, reward, terminated, truncated, _ = game.step("1")
        except Exception as error:
            failed[name] = repr(error)
            continue
        assert question == game.reset(1)
        assert (reply, terminated, truncated) == ("", True, False)
        assert 0 <= float(reward) <= 1
    assert len(names) > 100
    assert set(failed) == {"rg:boxnet", "rg:composite"}, failed  # as docs/guides/suites.md has it
