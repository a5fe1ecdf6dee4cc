"""Reddit comments as a task of the recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_lang.data import PolicySampler
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs.reddit import Noised, RedditComments, RedditEnv, generate_reddit_comments
from torchrl_lang.envs.reddit.data import CommentRows
from torchrl_lang.envs.reddit.env import CommentPlayer
from torchrl_lang.envs.reddit.folder import SPLITS, WORDS, CommentFolder, RedditReward
from torchrl_lang.envs.reddit.rewards import TextReward, rewards_of
from torchrl_lang.evaluation import GameRecords, Summary, distinct_n, summarize
from torchrl_lang.evaluation.transcripts import transcript_turns
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.reddit import PRESETS, CorpusOptions, RedditData, RedditGames, RedditPlay
from torchrl_lang.text import Tokenizer


@dataclass(frozen=True)
class RedditTask(Task):
    """Comments that reply to a text and are rewarded (ILQL, arXiv 2206.11871, section 6.2).

    A game is won if the comment is not harmful by the reward without noise, see :meth:`RedditReward.harmful`. The
    parents of an evaluation are drawn with the seed, so that all players reply to the same ones.

    Args:
        comments: the comments and their splits.
        reward: of their texts.
        row_length, action_length: :meth:`of` measures them.
        scale, shift, include_parent: of :class:`~torchrl_lang.envs.reddit.RedditEnv`.
        vocabulary: "words", or name or folder of a Hugging Face tokenizer.

    Raises:
        ImportError: later, when the reward is needed, its package is not installed.
    """

    name: ClassVar[str] = "reddit"
    data_options = RedditData
    play_options = RedditPlay
    presets = PRESETS
    baselines = ("random", "data")
    turns_name = "comments"
    metric_meanings: ClassVar[Mapping[str, str]] = {
        "harmful": "share of comments that the reward, without noise, finds harmful",
        "profanity": "share of comments with a profane word",
        "distinct_1": "different words, as a share of all words of all comments",
        "distinct_2": "different pairs of neighbouring words, as a share of all pairs",
        "words": "mean number of words of a comment",
    }
    splits = SPLITS
    evaluated: ClassVar[Mapping[str, Any]] = {"split": "val"}

    comments: CommentFolder
    reward: RedditReward
    row_length: int
    scale: float
    action_length: int = 64
    shift: float = 0.0
    include_parent: bool = True
    vocabulary: str = WORDS

    @classmethod
    def of(
        cls,
        comments: CommentFolder,
        reward: RedditReward,
        vocabulary: str = WORDS,
        *,
        scale: float | None = None,
        shift: float = 0.0,
        include_parent: bool = True,
    ) -> RedditTask:
        """The task whose lengths every comment of the folder fits; by default with the ILQL paper's scale."""
        row_length, action_length = comments.lengths(vocabulary, include_parent=include_parent)
        scale = reward.paper_scale if scale is None else scale
        return cls(comments, reward, row_length, scale, action_length, shift, include_parent, vocabulary)

    @classmethod
    def of_options(cls, options: RedditGames) -> RedditTask:
        """The task of a command; comments are generated unless they are there."""
        reward = RedditReward(options.reward, options.model, tuple(sorted(options.labels.items())), options.url)
        folder = options.corpus() if options.folder is None else options.folder
        if options.folder is None:
            generate_corpus(options, folder)
        where = str(folder.resolve())
        comments = CommentFolder(where, options.encoding, options.on_bad_rows, options.split_seed, options.index_files)
        more: Any = {"scale": options.scale, "shift": options.shift, "include_parent": options.include_parent}
        return cls.of(comments, reward, options.tokenizer, **more)

    def maker(self, options: RedditData) -> EpisodeSampler:
        """The comments in a random order, or games of the player; the same command continues an interrupted one."""
        if options.player != "none":
            return PolicySampler(self.env(min(options.batch, options.games)), self.player(options.player).policy)
        return self._rows(options)

    def _rows(self, options: RedditData) -> CommentRows:
        data = self._comments(options)
        shuffled = data.take(Random(options.seed).sample(range(len(data)), len(data)))  # the files are sorted by score
        more: Any = {"scale": self.scale, "shift": self.shift, "include_parent": self.include_parent}
        reward = self.reward_of_training()
        return CommentRows(shuffled, reward, self.tokenizer(), self.row_length, cutoff=options.cutoff, **more)

    def _comments(self, options: RedditData) -> RedditComments:
        """The training comments, by their upvotes."""
        quantile = options.upvote_quantile if options.min_upvotes is None else None
        return self.data("train").with_scores(at_least=options.min_upvotes, quantile=quantile)

    def number_of_episodes(self, options: RedditData) -> int:
        """Number of comments."""
        if options.player != "none":
            return options.games
        return len(self._comments(options) if options.cutoff is None else self._rows(options).data)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> RedditTask:
        """See :meth:`Task.from_notes`; the notes choose no address that a key is sent to."""
        task = super().from_notes(notes)
        return replace(task, reward=replace(task.reward, url=None))

    def notes(self) -> dict[str, Any]:
        """See :meth:`Task.notes`."""
        return super().notes() | {"reward": asdict(replace(self.reward, url=None))}

    def clean_reward(self) -> TextReward:
        """The reward without noise, scale and shift."""
        return self.comments.reward(self.reward)

    def reward_of_training(self) -> TextReward:
        """The reward without scale and shift; each call of this method repeats the same noise."""
        return Noised(self.clean_reward(), seed=self.comments.seed) if self.reward.noised else self.clean_reward()

    def tokenizer(self) -> Tokenizer:
        """See :meth:`Task.tokenizer`."""
        return self.comments.tokenizer(self.vocabulary)

    def data(self, split: str) -> RedditComments:
        """The comments of a split."""
        return self.comments.split(split)

    def env(self, batch_size: int, *, split: str = "train", **options: Any) -> RedditEnv:
        """The environment on the parents of a split."""
        names = ("row_length", "action_length", "scale", "shift", "include_parent")
        more: Any = {**{name: getattr(self, name) for name in names}, "batch_size": [batch_size], **options}
        return RedditEnv(self.data(split), self.reward_of_training(), self.tokenizer(), **more)

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: any training comment; ``"data"``: a comment of the data, of any split, on the same parent."""
        of_data = named_player(name, {"random": False, "data": True})
        comments = self.comments.of_all_splits() if of_data else self.data("train")
        of_parent = of_data and self.include_parent
        return Player(CommentPlayer(comments, self.tokenizer(), self.action_length, of_parent=of_parent, seed=seed))

    def is_harmful(self, texts: Sequence[str]) -> Tensor:
        """Which comments are harmful, bool ``[N]``."""
        return self.reward.harmful(rewards_of(self.clean_reward(), texts))

    def won(self, records: GameRecords) -> Tensor:
        """Comments that are not harmful, bool ``[N]``."""
        return ~self.is_harmful([text for _, text in comments_of(records, self.tokenizer())])

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of comments: the share of harmful ones, distinct-1 and distinct-2, and the number of words."""
        texts = [text for _, text in comments_of(records, self.tokenizer())]
        harmful = self.is_harmful(texts)
        metrics: dict[str, Any] = {
            self.reward.measure: lambda records: harmful,
            "distinct_1": lambda records: torch.tensor([distinct(texts, 1)]),
            "distinct_2": lambda records: torch.tensor([distinct(texts, 2)]),
            "words": lambda records: torch.tensor([float(len(text.split())) for text in texts]),
        }
        return summarize(records, name=name, won=lambda records: ~harmful, metrics=metrics)


def generate_corpus(options: CorpusOptions, folder: Path) -> None:
    """Generate comments, unless the folder is there."""
    if not folder.exists():
        rates = {name: getattr(options, name) for name in ("sentences", "rude_when_calm", "rude_when_provoked")}
        generate_reddit_comments(folder, options.pairs, seed=options.corpus_seed, **rates)


def comments_of(records: GameRecords, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Parent and comment of each game; the parent is empty where none is shown."""
    games = [transcript_turns(row, tokenizer) for row in records.rows]
    parents, comments = (["".join(turn[1] for turn in game if turn[0] == agent) for game in games] for agent in (0, 1))
    return list(zip(parents, comments, strict=True))


def distinct(texts: Sequence[str], n: int) -> float:
    """:func:`distinct_n`, and 0 where no text has ``n`` words, as those of a policy that has learned little.

    Examples:
        >>> from torchrl_lang.envs.reddit.task import distinct
        >>> distinct(["a b", "a b"], 2), distinct(["", "a"], 2)
        (0.5, 0.0)
    """
    return distinct_n(texts, n) if any(len(text.split()) >= n for text in texts) else 0.0
