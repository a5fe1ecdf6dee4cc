"""Players that write the data's comments, and rows of comments, by plain loops."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs.reddit import Noised, RedditComments, RedditEnv
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.env import CommentPlayer
from torchrl_lang.text import CharTokenizer

LETTERS = CharTokenizer.from_alphabet("abcdef")
DATA = RedditComments(["ab", "c", "ab", "fade", ""], ["a", "be", "cab", "d", "e"], [3, -1, 0, 2, 1])


def count(texts):
    return torch.tensor([float(text.count("a")) for text in texts])


def written(player, env, numbers):
    action = player(env.reset(game_seed=torch.tensor(numbers)))["action"]
    return [LETTERS.decode(row).split("</a>")[0] for row in action.tolist()]


def env_of(batch, **options):
    return RedditEnv(DATA, count, LETTERS, row_length=14, action_length=4, batch_size=[batch], **options)


def test_comments_on_the_shown_parent():
    player = CommentPlayer(DATA, LETTERS, 4, of_parent=True, seed=0)
    found = [written(player, env_of(5), range(5)) for _ in range(40)]
    allowed = [{"a", "cab"}, {"be"}, {"a", "cab"}, {"d"}, {"e"}]
    for place, texts in enumerate(zip(*found, strict=True)):
        assert set(texts) == allowed[place]
    again = CommentPlayer(DATA, LETTERS, 4, of_parent=True, seed=0)
    assert [written(again, env_of(5), range(5)) for _ in range(40)] == found


def test_any_comment_as_often_as_it_occurs():
    data = RedditComments(["x"] * 4, ["a", "a", "a", "b"], [1] * 4)
    player = CommentPlayer(data, LETTERS, 4, seed=1)
    texts = [text for _ in range(40) for text in written(player, env_of(10), [1] * 10)]
    assert set(texts) == {"a", "b"}
    assert texts.count("a") / 400 == pytest.approx(0.75, abs=0.08)


def test_what_no_player_can_write():
    env = env_of(1)
    with pytest.raises(ValueError, match=r"has no comment on .*fade"):
        CommentPlayer(DATA.take([0]), LETTERS, 4, of_parent=True)(env.reset(game_seed=torch.tensor([3])))
    with pytest.raises(ValueError, match="'cab' has 4 tokens with its end, action_length=3"):
        CommentPlayer(DATA.take([2]), LETTERS, 3)(env.reset())


def test_noise_does_not_depend_on_the_parts():
    data = RedditComments(["b"] * 20, ["a"] * 20, [1] * 20)

    def make():
        return CommentRows(data, Noised(count, seed=3), LETTERS, 14)

    whole = make()(range(20), 0)
    parts = make()
    cut = torch.cat([parts(range(0, 7), 1), parts(range(7, 20), 2)])
    assert isinstance(whole, TensorDict)
    assert torch.equal(whole["token_reward"], cut["token_reward"])
    assert set(whole["token_reward"].sum(-1).tolist()) == {0.0, 2.0}
