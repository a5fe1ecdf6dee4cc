"""Options and presets of Wordle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, Options, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import task_class

PRESETS: dict[str, dict[str, Any]] = {
    # In the same time, many steps of few games and of a small model learn most. Returns over several turns make Q less
    # noisy; the players of the data are good enough for that.
    "bc": {"batch_size": 32, "layers": 2},
    "ilql": {"batch_size": 32, "layers": 2, "qvalue_lmbda": 0.5},
    "evaluate": {"beta": (0.0, 2.0, 4.0, 8.0), "plots": True},
}

MEDIOCRE = (0.5, 0.3, 0.2)
"""Shares of games by the careful, the careless and the wrong player in the mixture ``"mediocre"``."""

HABIT = (0.25, "tummy", ("learn", "canoe", "drove", "windy", "price"))
"""The player ``"habit"``: probability of its favourite first word, that word, and its other first words."""

PlayerName = Literal["mediocre", "habit", "careful", "careless", "lmrl", "random", "wrong", "repeat", "optimal"]


@dataclass(frozen=True, kw_only=True)
class WordleGames(Options, group="data"):
    """Options that define the games."""

    words: str = option("100", "how many of the shipped words, `all` of them, or a file with one word a line")
    rules: Literal["official", "ilql"] = option("official", "`ilql` does not count repeated letters")

    def task(self) -> Any:
        """The task."""
        kind: Any = task_class("wordle")
        return kind.of(self.words, self.rules)


@with_defaults(games=60_000, batch=2048)
class WordleData(WordleGames, DataOptions):
    """Generate a dataset of Wordle games by scripted players."""

    player: PlayerName = option("mediocre", "the behaviour policy: a mixture of scripted players, or one of them")
    make: Literal["games", "branched", "adversarial", "human"] = option(
        "games",
        "games: of --player; branched, adversarial: an expert's, continued by others; human: people's, from --tweets",
    )
    tweets: Path | None = option(None, "with `--make human`: a CSV file of tweeted games")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.make == "human") != (self.tweets is not None):
            raise ValueError("--make human needs --tweets with the CSV file of tweeted games, and others take none.")
        if self.make != "games" and self.player != "mediocre":
            raise ValueError(f"--make {self.make} has players of its own: omit --player {self.player}.")

    def notes(self) -> dict[str, Any]:
        """Settings of the games beside the task."""
        if self.make != "games":
            return super().notes()
        mixture = list(MEDIOCRE) if self.player in ("mediocre", "habit") else None
        habit = {"habit": list(HABIT)} if self.player == "habit" else {}
        return {"player": self.player, "mixture": mixture, **habit, **super().notes()}


@with_defaults(words="all")
class WordlePlay(WordleGames, PlayOptions):
    """Play Wordle in the terminal with coloured tiles, or watch a policy."""


@dataclass(frozen=True, kw_only=True)
class SolveWordle(WordleGames):
    """Find the least expected number of guesses in Wordle and the decision tree that needs it."""

    guesses: str | None = option(None, "valid guesses beside the words: `all` of the shipped ones, or a file")
    opener: str | None = option(None, "the first guess, instead of the best one")
    max_tries: int | None = option(
        None, "guesses of a game, after which a word is lost and counts as one guess more", ge=1
    )
    out: Path | None = option(None, "file for the decision tree, as JSON")
