"""The environment of one step with and without the parent, and players that write the data's comments."""

import pytest
import torch

from tests.envs.helpers import say_after
from torchrl_lang.envs import TokenEnv, check_language_env
from torchrl_lang.envs.reddit import Noised, RedditComments, RedditEnv
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.env import CommentPlayer
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


def test_rows_are_those_of_the_episodes():
    """What the agent earns in the environment is what the dataset has for the same comment."""
    env = make([4], scale=-5.0, shift=1.0)
    played = say_after(env, env.reset(game_seed=torch.arange(4)), *DATA.comments)
    assert [from_row(row, LETTERS) for row in played] == DATA.episodes(count, scale=-5.0, shift=1.0)
    env = make([2], include_parent=False)
    td = say_after(env, env.reset(), "aa", "b")
    assert LETTERS.decode(td["tokens"][0, :5]) == "<a>aa</a></eod>"
    assert td["reward"].flatten().tolist() == [2.0, 0.0]


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


SHOWN = RedditComments(["ab", "c", "ab", "fade", ""], ["a", "be", "cab", "d", "e"], [3, -1, 0, 2, 1])


def written(player, env, numbers):
    action = player(env.reset(game_seed=torch.tensor(numbers)))["action"]
    return [LETTERS.decode(row).split("</a>")[0] for row in action.tolist()]


def test_comments_on_the_shown_parent():
    player = CommentPlayer(SHOWN, LETTERS, 4, of_parent=True, seed=0)
    found = [written(player, make([5], data=SHOWN), range(5)) for _ in range(40)]
    allowed = [{"a", "cab"}, {"be"}, {"a", "cab"}, {"d"}, {"e"}]
    for place, texts in enumerate(zip(*found, strict=True)):
        assert set(texts) == allowed[place]
    again = CommentPlayer(SHOWN, LETTERS, 4, of_parent=True, seed=0)
    assert [written(again, make([5], data=SHOWN), range(5)) for _ in range(40)] == found


def test_any_comment_as_often_as_it_occurs():
    data = RedditComments(["x"] * 4, ["a", "a", "a", "b"], [1] * 4)
    player = CommentPlayer(data, LETTERS, 4, seed=1)
    texts = [text for _ in range(40) for text in written(player, make([10], data=SHOWN), [1] * 10)]
    assert set(texts) == {"a", "b"}
    assert texts.count("a") / 400 == pytest.approx(0.75, abs=0.08)


def test_what_no_player_can_write():
    env = make([1], data=SHOWN)
    with pytest.raises(ValueError, match=r"has no comment on .*fade"):
        CommentPlayer(SHOWN.take([0]), LETTERS, 4, of_parent=True)(env.reset(game_seed=torch.tensor([3])))
    with pytest.raises(ValueError, match="'cab' has 4 tokens with its end, action_length=3"):
        CommentPlayer(SHOWN.take([2]), LETTERS, 3)(env.reset())


def test_noise_does_not_depend_on_the_parts():
    data = RedditComments(["b"] * 20, ["a"] * 20, [1] * 20)

    whole, parts = (CommentRows(data, Noised(count, seed=3), LETTERS, 14) for _ in range(2))
    whole = whole(range(20), 0)
    cut = torch.cat([parts(range(0, 7), 1), parts(range(7, 20), 2)])
    assert torch.equal(whole["token_reward"], cut["token_reward"])
    assert set(whole["token_reward"].sum(-1).tolist()) == {0.0, 2.0}
