"""A folder of Reddit comments and the reward of their texts, as a task of the recipes has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Literal

from torch import Tensor

from torchrl_lang._checks import check_options, checked
from torchrl_lang._files import folder_digest
from torchrl_lang.envs import reddit
from torchrl_lang.envs.reddit.data import RedditComments
from torchrl_lang.envs.reddit.rewards import TextReward
from torchrl_lang.envs.reddit.upvotes import TfidfModel, UpvoteModel
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer
from torchrl_lang.text.tokenizers import PLAIN, most_tokens

SPLITS = ("test", "val", "train")
WORDS = "words"
"""The tokenizer of the words of the training comments and of what they reply to."""
RewardName = Literal["profanity", "profanity_noised", "moderation", "sentiment", "upvotes", "score", "classifier"]

_INDEX_FILES = {"test": "test_idxs.json", "val": "eval_idxs.json", "train": "train_idxs.json"}
_SHARE = 0.1
"""Of the comments, for ``test`` and for ``val``."""
_CACHE, _ADDRESS = "rewards.sqlite", "OPENAI_BASE_URL"
_LEVELS = ("profanity", "profanity_noised", "moderation")
"""Rewards of which 1 and 2 are harmful."""


@checked
@dataclass(frozen=True)
class RedditReward:
    """A reward by its name.

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
        url: with "moderation", the base URL of the endpoint, by default that of the variable ``OPENAI_BASE_URL``. The
            key, from ``OPENAI_API_KEY``, is sent there: no dataset or run records the URL, so none can choose it.

    Raises:
        ValueError: the name is unknown, or an option is missing or belongs to another reward.
    """

    name: RewardName = "profanity"
    model: str | None = None
    labels: tuple[tuple[str, float], ...] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        needed = {"classifier": {"model", "labels"}, "moderation": {"model"}}.get(self.name, set())
        free = {"moderation": {"url"}, "upvotes": {"model"}}.get(self.name, set())
        found = {name for name in ("model", "labels", "url") if getattr(self, name)}
        if not needed <= found <= needed | free:
            words = [" and ".join(sorted(names)) or "none of model, labels and url" for names in (needed, found)]
            raise ValueError(f"The reward {self.name!r} needs {words[0]}, got {words[1]}.")

    @property
    def noised(self) -> bool:
        """Whether the reward of training is noised."""
        return self.name == "profanity_noised"

    @property
    def measure(self) -> str:
        """The name of the metric of :meth:`harmful`."""
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
        """The reward without noise; the values of a model are stored in the folder of the comments.

        Args:
            folder: of the comments.
            train: those to train a model of upvotes on.
            comments: all that have a score.

        Raises:
            ImportError: its package is not installed; the message names the extra.
        """
        if self.name == "score":
            return reddit.ScoreReward(comments, unknown=0.0)
        if self.name == "upvotes":
            if self.model is None:
                return TfidfModel.fit(train.comments, [score > 0 for score in train.scores])
            return self._cached(UpvoteModel.load(self.model), folder)
        if self.name == "sentiment":
            return self._cached(reddit.SentimentReward(), folder, version("vaderSentiment"))
        if self.name == "classifier":
            return self._cached(reddit.ClassifierReward(str(self.model), dict(self.labels)), folder)
        if self.name == "moderation":
            url = self.url or os.environ.get(_ADDRESS)
            if not url:
                raise ValueError(f"The reward 'moderation' needs an address now, none is recorded: set {_ADDRESS}.")
            endpoint = reddit.ModerationAPIReward(url, str(self.model), score="largest")
            return reddit.ThreeLevels(self._cached(endpoint, folder, url, batch_size=endpoint.batch_size))
        profanity = self._cached(reddit.ProfanityReward(), folder, version("alt-profanity-check"))
        return reddit.ThreeLevels(reddit.WorstSentence(profanity))

    def _cached(self, reward: TextReward, folder: str | Path, source: str = "", **options: int) -> TextReward:
        """``reward`` with a file of values, stored under all that defines them."""
        content = folder_digest(self.model) if self.model is not None and Path(self.model).is_dir() else ""
        parts = (self.measure, self.name.removesuffix("_noised"), self.model, content, self.labels, source)
        name = " ".join(str(part) for part in parts if part)
        return reddit.CachedReward(reward, Path(folder) / _CACHE, model=name, **options)


@dataclass(frozen=True)
class CommentFolder:
    """The comments of a folder; splits, tokenizer and rewards are made once in a process and shared.

    Files are read once: they are not changed while they are used. The splits are made by the comments' texts, and none
    is in two of them; or by the folder's index files, and no row is in two of them. A parent may be in several.

    Args:
        folder: has the two CSV files, see :meth:`RedditComments.read`.
        encoding: of the files.
        on_bad_rows: whether malformed rows are an error.
        seed: of the splits by texts.
        index_files: the splits are the rows of ``train_idxs.json``, ``eval_idxs.json`` and ``test_idxs.json``.

    Raises:
        FileError: on reading, a file is missing or damaged, or a row is in two index files.
        ValueError: on reading, a split has no comment.
    """

    folder: str
    encoding: str = "utf-8"
    on_bad_rows: Literal["raise", "report"] = "raise"
    seed: int = 0
    index_files: bool = False

    def split(self, name: str) -> RedditComments:
        """The comments of a split."""
        check_options(split=(name, SPLITS))
        return self._splits()[name]

    def of_all_splits(self) -> RedditComments:
        """The comments of all splits."""
        parts = [self.split(name) for name in SPLITS]
        columns = (chain(*(getattr(part, key) for part in parts)) for key in ("parents", "comments", "scores"))
        return RedditComments(*columns)  # type: ignore[arg-type]

    @lru_cache(maxsize=4)  # noqa: B019  # equal folders have the same content
    def _splits(self) -> dict[str, RedditComments]:
        if self.index_files:
            files = [Path(self.folder) / file for file in _INDEX_FILES.values()]
            parts = RedditComments.read_parts(self.folder, files, encoding=self.encoding, on_bad_rows=self.on_bad_rows)
            found = dict(zip(_INDEX_FILES, parts, strict=True))
        else:
            every = RedditComments.read(self.folder, encoding=self.encoding, on_bad_rows=self.on_bad_rows)
            rest, test = every.split(_SHARE, seed=self.seed)
            train, val = rest.split(_SHARE / (1 - _SHARE), seed=self.seed + 1)
            found = {"test": test, "val": val, "train": train}
        for name, part in found.items():
            if not len(part):
                total = sum(map(len, found.values()))
                raise ValueError(f"None of the {total} comments of {self.folder} is in the split {name}: add some.")
        return found

    @lru_cache(maxsize=8)  # noqa: B019
    def tokenizer(self, name: str) -> Tokenizer:
        """That of the training texts' words, or a Hugging Face tokenizer by its name or folder.

        If a split has more than printable ASCII, that of words has an unknown symbol.
        """
        if name != WORDS:
            return HFTokenizer(name)
        train, every = self.split("train"), self.of_all_splits()
        unknown = not set(chain.from_iterable((*every.parents, *every.comments))) <= set(PLAIN)
        return word_tokenizer((*train.parents, *train.comments), unknown=unknown)

    @lru_cache(maxsize=8)  # noqa: B019
    def lengths(self, tokenizer: str, *, include_parent: bool) -> tuple[int, int]:
        """``row_length`` and ``action_length`` of the longest texts of all splits.

        Raises:
            FileError: the tokenizer cannot encode a text.
        """

        def longest(kind: str) -> int:
            parts = (zip(part.places, getattr(part, kind), strict=True) for part in map(self.split, SPLITS))
            return most_tokens(self.tokenizer(tokenizer), self.folder, chain.from_iterable(parts))

        comment, parent = longest("comments"), longest("parents") if include_parent else 0
        return 4 + parent + comment, 1 + comment

    @lru_cache(maxsize=8)  # noqa: B019
    def reward(self, chosen: RedditReward) -> TextReward:
        """A reward without noise."""
        return chosen.clean(self.folder, self.split("train"), self.of_all_splits())
