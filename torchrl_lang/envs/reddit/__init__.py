"""Comments that reply to a text and earn a reward: the third task of ILQL (arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.reddit.classifiers import ClassifierReward
from torchrl_lang.envs.reddit.data import CommentRows, RedditComments
from torchrl_lang.envs.reddit.env import RedditEnv
from torchrl_lang.envs.reddit.generator import generate_reddit_comments
from torchrl_lang.envs.reddit.moderation import ModerationAPIReward
from torchrl_lang.envs.reddit.players import CommentPlayer
from torchrl_lang.envs.reddit.rewards import (
    CachedReward,
    Noised,
    ProfanityReward,
    ScoreReward,
    SentimentReward,
    TextReward,
    ThreeLevels,
    WorstSentence,
)
from torchrl_lang.envs.reddit.upvotes import TfidfModel, UpvoteModel, train_upvote_baseline, train_upvote_model

__all__ = [
    "CachedReward",
    "ClassifierReward",
    "CommentPlayer",
    "CommentRows",
    "ModerationAPIReward",
    "Noised",
    "ProfanityReward",
    "RedditComments",
    "RedditEnv",
    "ScoreReward",
    "SentimentReward",
    "TextReward",
    "TfidfModel",
    "ThreeLevels",
    "UpvoteModel",
    "WorstSentence",
    "generate_reddit_comments",
    "train_upvote_baseline",
    "train_upvote_model",
]
