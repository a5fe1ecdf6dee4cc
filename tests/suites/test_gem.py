"""GEM and reasoning-gym as they are installed."""

import random

import pytest

from tests.envs.helpers import check_game
from torchrl_lang.envs import GemGame

gem = pytest.importorskip("gem", reason="gem-llm is not installed: make test-suites runs these tests")


def boxed(text):
    return f"\\boxed{{{text}}}"


@pytest.mark.parametrize(
    ("name", "words"),
    [("rg:leg_counting", ["12", "x"]), ("rg:chain_sum", ["3"]), ("game:GuessTheNumber-v0-easy", ["1", "5", "x"])],
)
def test_the_rules_of_language_environments(name, words):
    check_game(lambda: GemGame(gem.make(name), act=boxed), *words, row_length=2000, action_length=12)


def test_a_seed_asks_the_same_question_however_many_were_asked():
    game = GemGame(gem.make("rg:chain_sum", size=3))
    first = [game.reset(seed) for seed in range(8)]
    assert [game.reset(seed) for seed in range(8)] == first
    assert 1 < len(set(first)) <= 3


def test_a_game_of_turns_with_suffixes():
    game = GemGame(gem.make("game:GuessTheNumber-v0-easy"))
    state = random.getstate()
    assert game.reset(3).endswith("to start the game.\nEnter your next guess.")
    reply, *turn, _ = game.step(boxed("3"))
    assert reply.endswith("higher than 3.\nEnter your next guess.")
    assert turn == [0.0, False, False]
    assert game.step("foo")[1:4] == (-0.1, True, False)
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
