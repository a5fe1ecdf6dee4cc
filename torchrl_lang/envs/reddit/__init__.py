"""Comments that reply to a text and earn a reward: the third task of ILQL (arXiv 2206.11871, section 6)."""

from torchrl_lang.envs.reddit.classifiers import ClassifierReward
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.envs.reddit.env import RedditEnv
from torchrl_lang.envs.reddit.generator import generate_reddit_comments
from torchrl_lang.envs.reddit.moderation import ModerationAPIReward
from torchrl_lang.envs.reddit.rewards import (
    CachedReward,
    Noised,
    ProfanityReward,
    ScoreReward,
    SentimentReward,
    ThreeLevels,
    WorstSentence,
)

__all__ = [
    "CachedReward",
    "ClassifierReward",
    "ModerationAPIReward",
    "Noised",
    "ProfanityReward",
    "RedditComments",
    "RedditEnv",
    "ScoreReward",
    "SentimentReward",
    "ThreeLevels",
    "WorstSentence",
    "generate_reddit_comments",
]
