"""Options and presets of Reddit comments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, Options, PlayOptions, option, with_defaults
from torchrl_lang.recipes.options import pairs as named_values
from torchrl_lang.recipes.tasks import task_class

_MODEL: Mapping[str, Any] = {"layers": 2, "batch_size": 32, "steps": 1500, "eval_every": 750, "eval_games": 200}

_ILQL: Mapping[str, Any] = {
    # The reward of -5 a level follows the last token, and lambda-returns show it to tokens far ahead. Nearer to 1 the
    # value of a harmless sentence has the noise of the sentences after it, and that of a noised reward; with larger
    # weights the errors of values would take the shared layers from the language model.
    **{"target": "lambda", "lmbda": 0.5, "qvalue_weight": 0.1, "value_weight": 0.1},
    # Among many harmless tokens, values choose by their noise: the policy's own probabilities must do a part.
    **{"advantage_temperature": 2.0, "weight_clip": 20.0},
}


PRESETS: Mapping[str, Any] = {"bc": {**_MODEL}, "ilql": {**_MODEL, **_ILQL}, "evaluate": {"beta": (0.0, 1.0, 2.0, 4.0)}}


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(Options, group="data"):
    """Options of comments, which may be generated."""

    folder: Path | None = option(None, "folder with the two CSV files of comments; none: generate comments")
    encoding: str = option("utf-8", "of the CSV files")
    on_bad_rows: Literal["raise", "report"] = option("raise", "malformed rows are an error, or left out and listed")
    index_files: bool = option(
        False,
        "split the comments by the folder's train_idxs.json, eval_idxs.json and test_idxs.json, not by their texts",
    )
    pairs: int = option(4000, "without --folder, pairs of parent and comment to generate", ge=100)
    sentences: int = option(1, "sentences of a generated comment", ge=1, le=20)
    rude_when_calm: float = option(0.1, "probability that a generated sentence on a calm parent is rude", ge=0, le=1)
    rude_when_provoked: float = option(0.7, "the same on a provoking parent", ge=0, le=1)
    corpus_seed: int = option(0, "seed of generated comments", ge=0)


@dataclass(frozen=True, kw_only=True)
class RedditGames(CorpusOptions):
    """Options that define the task."""

    reward: Literal["profanity", "profanity_noised", "moderation", "sentiment", "upvotes", "score", "classifier"] = (
        option(
            "profanity",
            "what is rewarded or punished; score: upvotes that the data have, upvotes: that a model expects",
        )
    )
    model: str | None = option(None, "model of the rewards upvotes (a folder), classifier and moderation")
    labels: dict[str, Any] = named_values("with --reward classifier, each label of the model and its value")
    url: str | None = option(None, "with --reward moderation, the base URL of the endpoint; none: OPENAI_BASE_URL")
    scale: float | None = option(
        None, "factor of the reward; none: -5 for profanity and moderation, else 1", ge=-1e6, le=1e6
    )
    shift: float = option(0.0, "added to the scaled reward", ge=-1e6, le=1e6)
    include_parent: bool = option(True, "show the text that a comment replies to")
    tokenizer: str = option(
        "words", "words: those of the training texts; or name or folder of a Hugging Face tokenizer"
    )
    split_seed: int = option(0, "seed of the splits into training, validation and test comments", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_files and self.split_seed:
            raise ValueError(f"Splits by --index-files have no seed: leave out --split-seed {self.split_seed}.")

    def task(self) -> Any:
        """The task; comments are generated unless they are there."""
        kind: Any = task_class("reddit")
        return kind.of_options(self)

    def corpus(self) -> Path:
        """Where generated comments are."""
        raise ValueError("Give --folder: `generate reddit` writes generated comments to one beside its dataset.")


@with_defaults(batch=1024)
class RedditData(RedditGames, DataOptions):
    """Generate a dataset: the training comments with the chosen reward, or games of a player."""

    player: Literal["none", "data", "random"] = option(
        "none", "none: all training comments, regardless of --games; otherwise the player that writes --games comments"
    )
    cutoff: float | None = option(
        None,
        "keep comments whose reward, scaled and shifted, is at least this: the ILQL paper's cutoff",
        ge=-1e18,
        le=1e18,
    )
    min_upvotes: float | None = option(
        None, "keep comments with at least this number of upvotes, downvotes subtracted", ge=-1e18, le=1e18
    )
    upvote_quantile: float = option(
        0.0, "keep comments with at least this quantile of the upvotes: 0.9 for the best tenth", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_upvotes is not None and self.upvote_quantile:
            raise ValueError("Give one of --min-upvotes and --upvote-quantile.")
        if self.player != "none" and (self.upvote_quantile or self.min_upvotes is not None or self.cutoff is not None):
            raise ValueError(f"--cutoff, --min-upvotes and --upvote-quantile need --player none, not {self.player}.")

    def corpus(self) -> Path:
        """Generated comments are beside the dataset."""
        rudeness = f"{self.sentences}-{self.rude_when_calm:g}-{self.rude_when_provoked:g}"
        return self.out.with_name(f"{self.out.name}-comments-{self.pairs}-{rudeness}-{self.corpus_seed}")

    def notes(self) -> dict[str, Any]:
        """Settings of the rows beside the task."""
        if self.player != "none":
            return {"player": self.player, **super().notes()}
        chosen = {"cutoff": self.cutoff, "min_upvotes": self.min_upvotes, "upvote_quantile": self.upvote_quantile}
        return {**{name: value for name, value in chosen.items() if value is not None}, "order": self.seed}


@dataclass(frozen=True, kw_only=True)
class RedditPlay(RedditGames, PlayOptions):
    """Reply to a comment, or watch a policy."""
