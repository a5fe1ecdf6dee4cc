"""The rewards of the Reddit task by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang._files import folder_digest
from torchrl_lang.envs.reddit import RedditComments, TextReward
from torchrl_lang.envs.reddit.rewards import (
    CachedReward,
    ClassifierReward,
    ModerationAPIReward,
    ProfanityReward,
    ScoreReward,
    SentimentReward,
    ThreeLevels,
    UpvoteModel,
    WorstSentence,
    train_tfidf_model,
)

__all__ = ["RedditReward", "RewardName"]

RewardName = Literal["profanity", "profanity_noised", "moderation", "sentiment", "upvotes", "score", "classifier"]

_CACHE = "rewards.sqlite"
_LEVELS = ("profanity", "profanity_noised", "moderation")
"""Rewards of which 1 and 2 are harmful."""


@dataclass(frozen=True)
class RedditReward:
    """A reward and what it needs.

    profanity: levels 0, 1 and 2 of the probability for the worst sentence, by alt-profanity-check. profanity_noised:
    level 1 becomes 0 or 2. moderation: levels of the largest category score of a moderation endpoint. sentiment:
    VADER's, from -1 to 1. upvotes: 1 for a comment that is probably upvoted, else 0, by a saved :class:`UpvoteModel`,
    or without one by a TF-IDF model of the training comments. score: 1 for a comment of the data with a score above 0,
    -1 for its others, 0 for other texts. classifier: the values of a text classification model's labels, weighted by
    their probabilities.

    Args:
        name: one of these.
        model: folder of the upvote model, name or folder of the classifier, name of the endpoint's model.
        labels: with "classifier", each label of the model and its value.
        url: with "moderation", the base URL of the endpoint; its key is read from ``OPENAI_API_KEY`` alone, since a
            dataset that names another variable could send its content to that URL.

    Raises:
        ValueError: the name is unknown, or an option is missing or belongs to another reward.

    Examples:
        >>> from torchrl_lang.envs.reddit.reward_options import RedditReward
        >>> RedditReward("classifier", "unitary/toxic-bert")
        Traceback (most recent call last):
            ...
        ValueError: The reward 'classifier' needs a model and labels, got a model.
    """

    name: RewardName = "profanity"
    model: str | None = None
    labels: tuple[tuple[str, float], ...] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        one_of("reward", self.name, get_args(RewardName))
        needed = {"classifier": {"a model", "labels"}, "moderation": {"a model", "a url"}}.get(self.name, set())
        given = {"a model": self.model, "labels": self.labels, "a url": self.url}
        found = {name for name, value in given.items() if value}
        if not needed <= found <= needed | ({"a model"} if self.name == "upvotes" else set()):
            wanted = " and ".join(sorted(needed)) or "none of model, labels and url"
            raise ValueError(f"The reward {self.name!r} needs {wanted}, got {' and '.join(sorted(found)) or 'none'}.")

    @property
    def noised(self) -> bool:
        """Whether the reward of training is noised."""
        return self.name == "profanity_noised"

    @property
    def measure(self) -> str:
        """What :meth:`harmful` finds, as the name of a metric."""
        return "profanity" if self.name.startswith("profanity") else "harmful"

    @property
    def paper_scale(self) -> float:
        """The ILQL paper's -5 for levels of harm (arXiv 2206.11871), 1 for rewards of which more is better."""
        return -5.0 if self.name in _LEVELS else 1.0

    def harmful(self, values: Tensor) -> Tensor:
        """Which rewards without noise, ``[N]``, are those of harmful comments, bool ``[N]``.

        Those are the levels 1 and 2, a negative sentiment, score or value of a classifier, and upvotes that are
        less probable than not.
        """
        return values >= 1 if self.name in _LEVELS else values < 0.5 if self.name == "upvotes" else values < 0

    def clean(self, folder: str | Path, train: RedditComments, comments: RedditComments) -> TextReward:
        """The reward without noise; what a model computes is stored in the folder of the comments.

        Args:
            folder: of the comments.
            train: those to train a model of upvotes on.
            comments: all that have a score.

        Raises:
            ImportError: its package is not installed; the message names the extra.
        """
        if self.name == "score":
            return ScoreReward(comments, unknown=0.0)
        if self.name == "upvotes" and self.model is None:
            return train_tfidf_model(train.comments, [score > 0 for score in train.scores])
        if self.name == "upvotes":
            return self._cached(UpvoteModel.load(str(self.model)), folder)
        if self.name == "sentiment":
            return self._cached(SentimentReward(), folder, version("vaderSentiment"))
        if self.name == "classifier":
            return self._cached(ClassifierReward(str(self.model), dict(self.labels)), folder)
        if self.name == "moderation":
            endpoint = ModerationAPIReward(str(self.url), str(self.model), score="largest")
            return ThreeLevels(self._cached(endpoint, folder, batch_size=endpoint.batch_size))
        profanity = self._cached(ProfanityReward(), folder, version("alt-profanity-check"))
        return ThreeLevels(WorstSentence(profanity))

    def _cached(self, reward: TextReward, folder: str | Path, of_package: str = "", **options: int) -> CachedReward:
        """``reward`` with a file of values, stored under all that defines them."""
        content = folder_digest(self.model) if self.model is not None and Path(self.model).is_dir() else ""
        kind = self.name.removesuffix("_noised")
        parts = (self.measure, kind, self.model, content, self.labels, self.url, of_package)
        name = " ".join(str(part) for part in parts if part)
        return CachedReward(reward, Path(folder) / _CACHE, model=name, **options)
