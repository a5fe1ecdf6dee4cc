"""Rewards of texts, ``list[str] -> Tensor`` float32 ``[N]``, and models of upvotes."""

from torchrl_lang.envs.reddit.rewards.cached import CachedReward
from torchrl_lang.envs.reddit.rewards.classifier import ClassifierReward
from torchrl_lang.envs.reddit.rewards.moderation import ModerationAPIReward
from torchrl_lang.envs.reddit.rewards.probability import ProbabilityReward
from torchrl_lang.envs.reddit.rewards.profanity import ProfanityReward
from torchrl_lang.envs.reddit.rewards.score import ScoreReward
from torchrl_lang.envs.reddit.rewards.sentiment import SentimentReward
from torchrl_lang.envs.reddit.rewards.tfidf import TfidfModel, train_tfidf_model
from torchrl_lang.envs.reddit.rewards.token_bucket import TokenBucket
from torchrl_lang.envs.reddit.rewards.upvote_model import UpvoteModel, UpvoteNetwork
from torchrl_lang.envs.reddit.rewards.upvote_training import (
    TrainedUpvotes,
    UpvoteTraining,
    train_upvote_baseline,
    train_upvote_model,
)
from torchrl_lang.envs.reddit.rewards.wrappers import Noised, ThreeLevels, WorstSentence

__all__ = [
    "CachedReward",
    "ClassifierReward",
    "ModerationAPIReward",
    "Noised",
    "ProbabilityReward",
    "ProfanityReward",
    "ScoreReward",
    "SentimentReward",
    "TfidfModel",
    "ThreeLevels",
    "TokenBucket",
    "TrainedUpvotes",
    "UpvoteModel",
    "UpvoteNetwork",
    "UpvoteTraining",
    "WorstSentence",
    "train_tfidf_model",
    "train_upvote_baseline",
    "train_upvote_model",
]
