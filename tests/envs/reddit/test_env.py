"""The environment of one step, with and without the parent."""

import pytest
import torch

from tests.envs.helpers import say_after
from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.reddit import Noised, RedditComments, RedditEnv
from torchrl_lang.text import CharTokenizer, from_row

LETTERS = CharTokenizer.from_alphabet("abcdef")
DATA = RedditComments(["ab", "c", "", "fade"], ["a", "be", "be", "cab"], [3, -1, 0, 2])


def count(texts):
    return torch.tensor([float(text.count("a")) for text in texts])


def make(batch_size=(2,), *, reward=count, tokenizer=LETTERS, data=DATA, **options):
    options = {"row_length": 14, "action_length": 4, "seed": 0, **options}
    return RedditEnv(data, reward, tokenizer, batch_size=batch_size, **options)


@pytest.mark.parametrize("include_parent", [True, False])
def test_the_rules_of_language_environments(include_parent):
    options = {"include_parent": include_parent, "scale": -5.0}
    check_language_env(make(**options), lambda n: make([n], **options), utterances=["a", "fed"])
    check_language_env(TokenEnv(make(**options)), lambda n: TokenEnv(make([n], **options)), utterances=["a", "fed"])


def test_one_step_without_the_parent():
    env = make([2], include_parent=False)
    td = say_after(env, env.reset(), "aa", "b")
    assert LETTERS.decode(td["tokens"][0, :5]) == "<a>aa</a></eod>"
    assert td["reward"].flatten().tolist() == [2.0, 0.0]


def test_rows_are_those_of_the_episodes():
    """What the agent earns in the environment is what the dataset has for the same comment."""
    env = make([4], scale=-5.0, shift=1.0)
    played = say_after(env, env.reset(game_seed=torch.arange(4)), *DATA.comments)
    assert [from_row(row, LETTERS) for row in played] == DATA.episodes(count, scale=-5.0, shift=1.0)


def test_parents_are_drawn_over_the_comments():
    data = RedditComments(["a", "a", "a", "b"], list("abcd"), [1] * 4)
    env = make([400], data=data)
    env.reset()
    shown = [data.parents[number] for number in env.game_seed.tolist()]
    assert 240 < shown.count("a") < 360


def test_a_seed_repeats_the_noise_of_the_reward():
    """On the same environment, whatever was drawn before; without a seed the noise goes on."""
    env = make([8], reward=Noised(lambda texts: torch.ones(len(texts)), seed=3), seed=None)
    found = []
    for seed in (5, 5, 6, None):
        if seed is not None:
            env.set_seed(seed)
        found.append(say_after(env, env.reset(), *["a"] * 8)["reward"].flatten().tolist())
    assert found[0] == found[1] != found[2] != found[3]
    assert {value for each in found for value in each} == {0.0, 2.0}


def test_wrong_options():
    with pytest.raises(ValueError, match="prompts"):
        make(data=DATA.take([]))
    env = make(reward=lambda texts: [1.0])
    with pytest.raises(ValueError, match="one number for each of 2 texts"):
        say_after(env, env.reset(), "a", "b")
