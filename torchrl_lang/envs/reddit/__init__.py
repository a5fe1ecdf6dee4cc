"""Comments that reply to a text and earn a reward: the third task of ILQL (arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.reddit.comment_rows import CommentRows
from torchrl_lang.envs.reddit.dataset import RedditComments
from torchrl_lang.envs.reddit.env import RedditEnv
from torchrl_lang.envs.reddit.files import BadRow, CommentRow, ReadReport, read_comment_rows, read_row_indices
from torchrl_lang.envs.reddit.makers import GeneratedComment, generate_reddit_comments, generated_comments
from torchrl_lang.envs.reddit.players import CommentPlayer
from torchrl_lang.envs.reddit.text_reward import TextReward, rewards_of

__all__ = [
    "BadRow",
    "CommentPlayer",
    "CommentRow",
    "CommentRows",
    "GeneratedComment",
    "ReadReport",
    "RedditComments",
    "RedditEnv",
    "TextReward",
    "generate_reddit_comments",
    "generated_comments",
    "read_comment_rows",
    "read_row_indices",
    "rewards_of",
]
