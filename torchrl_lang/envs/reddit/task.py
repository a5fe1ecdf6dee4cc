"""Reddit comments as a task of the recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torchrl_lang._checks import finite, one_of
from torchrl_lang._files import Fields
from torchrl_lang.data import GameMaker, PolicyGames
from torchrl_lang.envs.reddit import (
    CommentPlayer,
    CommentRows,
    RedditComments,
    RedditEnv,
    TextReward,
    generate_reddit_comments,
    rewards_of,
)
from torchrl_lang.envs.reddit.folder import SPLITS, WORDS, CommentFolder
from torchrl_lang.envs.reddit.reward_options import RedditReward, RewardName
from torchrl_lang.envs.reddit.rewards import Noised
from torchrl_lang.evaluation import GameRecords, Summary, distinct_n, summarize, transcript_turns
from torchrl_lang.recipes.options import Options, option, with_defaults
from torchrl_lang.recipes.options import pairs as named_values
from torchrl_lang.recipes.tasks.base import DataOptions, Player, PlayOptions, Task
from torchrl_lang.text import Tokenizer

__all__ = ["CorpusOptions", "RedditData", "RedditPlay", "RedditTask", "comments_of", "distinct"]

_MODEL: Mapping[str, Any] = {"layers": 2, "batch_size": 32, "steps": 1500, "eval_every": 750, "eval_games": 200}

_ILQL: Mapping[str, Any] = {
    # The reward of -5 a level follows the last token, and lambda-returns show it to tokens far ahead. Nearer to 1 the
    # value of a harmless sentence has the noise of the sentences after it, and that of a noised reward; with larger
    # weights the errors of values would take the shared layers from the language model.
    **{"target": "lambda", "lmbda": 0.5, "qvalue_weight": 0.1, "value_weight": 0.1},
    # Among many harmless tokens, values choose by their noise: the policy's own probabilities must do a part.
    **{"advantage_temperature": 2.0, "weight_clip": 20.0},
}


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(Options):
    """Options of comments, which may be generated."""

    folder: Path | None = option(None, "folder with the two CSV files of comments; none: generate comments")
    encoding: str = option("utf-8", "of the CSV files")
    on_bad_rows: Literal["raise", "report"] = option("raise", "malformed rows are an error, or left out and listed")
    index_files: bool = option(
        False,
        "split the comments by the folder's train_idxs.json, eval_idxs.json and test_idxs.json, not by their texts",
    )
    pairs: int = option(4000, "without --folder, pairs of parent and comment to generate", at_least=100)
    sentences: int = option(1, "sentences of a generated comment", at_least=1, at_most=20)
    rude_when_calm: float = option(
        0.1, "probability that a generated sentence on a calm parent is rude", at_least=0, at_most=1
    )
    rude_when_provoked: float = option(0.7, "the same on a provoking parent", at_least=0, at_most=1)
    corpus_seed: int = option(0, "seed of generated comments", at_least=0)

    def generate(self, folder: Path) -> None:
        """Generate the comments, unless the folder is there."""
        if not folder.exists():
            names = ("sentences", "rude_when_calm", "rude_when_provoked")
            rates: dict[str, Any] = {name: getattr(self, name) for name in names}
            generate_reddit_comments(folder, self.pairs, seed=self.corpus_seed, **rates)


@dataclass(frozen=True, kw_only=True)
class RedditGames(CorpusOptions):
    """Options that define the task."""

    reward: RewardName = option("profanity", "what is rewarded or punished")
    model: str | None = option(None, "model of the rewards upvotes (a folder), classifier and moderation")
    labels: dict[str, Any] = named_values("with --reward classifier, each label of the model and its value")
    url: str | None = option(None, "with --reward moderation, the base URL of the endpoint")
    scale: float | None = option(
        None, "factor of the reward; none: -5 for profanity and moderation, else 1", at_least=-1e6, at_most=1e6
    )
    shift: float = option(0.0, "added to the scaled reward", at_least=-1e6, at_most=1e6)
    include_parent: bool = option(True, "show the text that a comment replies to")
    tokenizer: str = option(WORDS, "words: those of the training texts; or name or folder of a Hugging Face tokenizer")
    split_seed: int = option(0, "seed of the splits into training, validation and test comments", at_least=0)

    def task(self) -> RedditTask:
        """The task; comments are generated unless they are there."""
        if self.index_files and self.split_seed:
            raise ValueError(f"Splits by index files have no seed, got split_seed={self.split_seed}: leave it out.")
        labels = tuple(sorted(self.labels.items()))
        reward = RedditReward(self.reward, self.model, labels, self.url)
        folder = self.corpus() if self.folder is None else self.folder
        if self.folder is None:
            self.generate(folder)
        where = str(folder.resolve())
        comments = CommentFolder(where, self.encoding, self.on_bad_rows, self.split_seed, self.index_files)
        scale = reward.paper_scale if self.scale is None else self.scale
        return RedditTask.of(
            comments, reward, self.tokenizer, scale=scale, shift=self.shift, include_parent=self.include_parent
        )

    def corpus(self) -> Path:
        """Where generated comments are."""
        raise ValueError("Give --folder: `generate reddit` writes generated comments to one beside its dataset.")


@with_defaults(batch=1024)
class RedditData(RedditGames, DataOptions):
    """Generate a dataset: the training comments with the chosen reward, or games of a player."""

    player: Literal["none", "data", "random"] = option(
        "none", "none: all training comments, instead of --games; otherwise a player that writes some of them"
    )
    cutoff: float | None = option(
        None,
        "keep comments whose reward, scaled and shifted, is at least this: the ILQL paper's cutoff",
        at_least=-1e18,
        at_most=1e18,
    )
    min_upvotes: float | None = option(
        None, "keep comments with at least this number of upvotes, downvotes subtracted", at_least=-1e18, at_most=1e18
    )
    upvote_quantile: float = option(
        0.0, "keep comments with at least this quantile of the upvotes: 0.9 for the best tenth", at_least=0, below=1
    )

    def corpus(self) -> Path:
        """Generated comments are beside the dataset."""
        rudeness = f"{self.sentences}-{self.rude_when_calm:g}-{self.rude_when_provoked:g}"
        return self.out.with_name(f"{self.out.name}-comments-{self.pairs}-{rudeness}-{self.corpus_seed}")

    def maker(self, task: Task) -> GameMaker:
        """The comments in a random order, or games of the player; the same command continues an interrupted one."""
        assert isinstance(task, RedditTask)
        if self.player != "none":
            if self.upvote_quantile or self.min_upvotes is not None or self.cutoff is not None:
                raise ValueError(
                    f"--cutoff, --min-upvotes and --upvote-quantile choose comments of the data, not games of a "
                    f"player: {self.player!r}."
                )
            return PolicyGames(task.env(min(self.batch, self.games)), task.player(self.player).policy)
        return self._rows(task)

    def _rows(self, task: RedditTask) -> CommentRows:
        data = self._comments(task)
        shuffled = data.take(Random(self.seed).sample(range(len(data)), len(data)))  # the files are sorted by score
        options: dict[str, Any] = {"scale": task.scale, "shift": task.shift, "include_parent": task.include_parent}
        reward = task.reward_of_training()
        return CommentRows(shuffled, reward, task.tokenizer(), task.row_length, cutoff=self.cutoff, **options)

    def _comments(self, task: RedditTask) -> RedditComments:
        """The training comments, by their upvotes."""
        if self.min_upvotes is None:
            return task.data("train").with_scores(quantile=self.upvote_quantile)
        if self.upvote_quantile:
            raise ValueError(
                f"Give either --min-upvotes or --upvote-quantile, got {self.min_upvotes:g} and "
                f"{self.upvote_quantile:g}."
            )
        return task.data("train").with_scores(at_least=self.min_upvotes)

    def number_of_episodes(self) -> int:
        """Number of comments."""
        if self.player != "none":
            return self.games
        task = self.task()
        return len(self._comments(task) if self.cutoff is None else self._rows(task).data)

    def notes(self) -> dict[str, Any]:
        """What the rows depend on beside the task."""
        if self.player != "none":
            return {"player": self.player, **super().notes()}
        chosen = {"cutoff": self.cutoff, "min_upvotes": self.min_upvotes, "upvote_quantile": self.upvote_quantile}
        return {**{name: value for name, value in chosen.items() if value is not None}, "order": self.seed}


@dataclass(frozen=True, kw_only=True)
class RedditPlay(RedditGames, PlayOptions):
    """Reply to a comment, or watch a policy."""


@dataclass(frozen=True)
class RedditTask(Task):
    """Comments that reply to a text and are rewarded (ILQL, arXiv 2206.11871, section 6.2).

    A game is won if the comment is not harmful by the reward without noise, see :meth:`RedditReward.harmful`. The
    parents of an evaluation are drawn with the seed, so that all players reply to the same ones.

    Args:
        folder, encoding, on_bad_rows, seed, index_files: of :class:`~torchrl_lang.envs.reddit.folder.CommentFolder`.
        reward, model, labels, url: of :class:`~torchrl_lang.envs.reddit.reward_options.RedditReward`.
        scale, shift, include_parent: of :class:`~torchrl_lang.envs.reddit.RedditEnv`.
        row_length, action_length: :meth:`of` measures them.
        vocabulary: "words", or name or folder of a Hugging Face tokenizer.

    Raises:
        ValueError: an option is unknown or does not fit the others.
        ImportError: later, when the reward is needed, its package is not installed.
    """

    name: ClassVar[str] = "reddit"
    data_options = RedditData
    play_options = RedditPlay
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "bc": _MODEL,
        "ilql": {**_MODEL, **_ILQL},
        "evaluate": {"beta": (0.0, 1.0, 2.0, 4.0)},
    }
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

    folder: str
    row_length: int = 128
    action_length: int = 64
    reward: RewardName = "profanity"
    model: str | None = None
    labels: tuple[tuple[str, float], ...] = ()
    url: str | None = None
    scale: float = -5.0
    shift: float = 0.0
    include_parent: bool = True
    vocabulary: str = WORDS
    encoding: str = "utf-8"
    on_bad_rows: Literal["raise", "report"] = "raise"
    seed: int = 0
    index_files: bool = False

    def __post_init__(self) -> None:
        finite("scale", self.scale, low=None)
        finite("shift", self.shift, low=None)
        one_of("on_bad_rows", self.on_bad_rows, ("raise", "report"))
        _ = self.chosen_reward

    @classmethod
    def of(
        cls,
        comments: CommentFolder,
        reward: RedditReward,
        vocabulary: str = WORDS,
        *,
        include_parent: bool = True,
        **options: float,
    ) -> RedditTask:
        """The task whose lengths every comment of the folder fits; ``options`` are ``scale`` and ``shift``."""
        lengths = comments.lengths(vocabulary, include_parent=include_parent)
        fields: dict[str, Any] = {**asdict(comments), **asdict(reward), **lengths._asdict(), **options}
        fields["reward"] = fields.pop("name")
        return cls(vocabulary=vocabulary, include_parent=include_parent, **fields)

    @classmethod
    def from_notes(cls, notes: Fields) -> RedditTask:
        """See :meth:`Task.from_notes`."""
        kinds: dict[str, type] = dict.fromkeys(("folder", "reward", "vocabulary", "encoding", "on_bad_rows"), str)
        kinds |= {"scale": float, "shift": float, "include_parent": bool}
        fields: dict[str, Any] = {name: notes.take(name, kind) for name, kind in kinds.items()}
        fields |= {name: notes.at_least(name, 1) for name in ("row_length", "action_length")}
        fields |= {name: notes.take(name, str, "") or None for name in ("model", "url")}
        labels = notes.object("labels")
        values = tuple((label, labels.take(label, float)) for label in sorted(labels.content))
        fields |= {"seed": notes.at_least("seed", 0), "index_files": notes.take("index_files", bool, False)}
        return cls(**fields, labels=values)

    def notes(self) -> dict[str, Any]:
        """See :meth:`Task.notes`."""
        return {**super().notes(), "labels": dict(self.labels)}

    @property
    def comments(self) -> CommentFolder:
        """The folder."""
        return CommentFolder(self.folder, self.encoding, self.on_bad_rows, self.seed, self.index_files)

    @property
    def chosen_reward(self) -> RedditReward:
        """The reward."""
        return RedditReward(self.reward, self.model, self.labels, self.url)

    def clean_reward(self) -> TextReward:
        """The reward without noise, scale and shift."""
        return self.comments.reward(self.chosen_reward)

    def reward_of_training(self) -> TextReward:
        """The reward without scale and shift; each call of this method repeats the same noise."""
        return Noised(self.clean_reward(), seed=self.seed) if self.chosen_reward.noised else self.clean_reward()

    def tokenizer(self) -> Tokenizer:
        """See :meth:`Task.tokenizer`."""
        return self.comments.tokenizer(self.vocabulary)

    def data(self, split: str) -> RedditComments:
        """The comments of a split."""
        return self.comments.split(split)

    def env(self, batch_size: int, *, split: str = "train", **options: Any) -> RedditEnv:
        """The environment on the parents of a split."""
        names = ("row_length", "action_length", "scale", "shift", "include_parent")
        fixed: dict[str, Any] = {name: getattr(self, name) for name in names}
        more = {**fixed, **options}
        return RedditEnv(self.data(split), self.reward_of_training(), self.tokenizer(), batch_size=[batch_size], **more)

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: any training comment; ``"data"``: a comment of the data, of any split, on the same parent."""
        one_of("player", name, self.baselines)
        comments = self.comments.of_all_splits() if name == "data" else self.data("train")
        options: dict[str, Any] = {"of_parent": name == "data" and self.include_parent, "seed": seed}
        return Player(CommentPlayer(comments, self.tokenizer(), self.action_length, **options))

    def evaluate(self, policy: Any, **options: Any) -> tuple[Summary, GameRecords]:
        """Reply to parents of a split, by default ``"val"``; see :meth:`Task.evaluate`."""
        return super().evaluate(policy, **{"split": "val", **options})

    def is_harmful(self, texts: Sequence[str]) -> Tensor:
        """Which comments are harmful, bool ``[N]``."""
        return self.chosen_reward.harmful(rewards_of(self.clean_reward(), texts))

    def won(self, records: GameRecords) -> Tensor:
        """Comments that are not harmful, bool ``[N]``."""
        return ~self.is_harmful([text for _, text in comments_of(records, self.tokenizer())])

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of comments: the share of harmful ones, distinct-1 and distinct-2, and the number of words."""
        texts = [text for _, text in comments_of(records, self.tokenizer())]
        harmful = self.is_harmful(texts)
        metrics: dict[str, Any] = {
            self.chosen_reward.measure: lambda records: harmful,
            **{f"distinct_{n}": partial(_distinct, texts, n) for n in (1, 2)},
            "words": lambda records: torch.tensor([float(len(text.split())) for text in texts]),
        }
        return summarize(records, name=name, won=lambda records: ~harmful, metrics=metrics)


def comments_of(records: GameRecords, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Parent and comment of each game; the parent is empty where none is shown."""
    found = []
    for row in records.rows:
        turns = transcript_turns(row, tokenizer)
        found.append(
            (
                "".join(text for by_agent, text, _ in turns if not by_agent),
                "".join(text for by_agent, text, _ in turns if by_agent),
            )
        )
    return found


def distinct(texts: Sequence[str], n: int) -> float:
    """:func:`distinct_n`, and 0 where no text has ``n`` words, as those of a policy that has learned little.

    Examples:
        >>> from torchrl_lang.envs.reddit.task import distinct
        >>> distinct(["a b", "a b"], 2), distinct(["", "a"], 2)
        (0.5, 0.0)
    """
    return distinct_n(texts, n) if any(len(text.split()) >= n for text in texts) else 0.0


def _distinct(texts: Sequence[str], n: int, records: GameRecords) -> Tensor:
    return torch.tensor([distinct(texts, n)])
