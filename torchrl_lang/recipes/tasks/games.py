"""Options and presets of the games in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import GamesOptions

PRESETS: dict[str, dict[str, Any]] = {"evaluate": {"games": 200, "beta": (0.0, 2.0, 4.0, 8.0)}}


@dataclass(frozen=True, kw_only=True)
class WordGames(GamesOptions, of_task="games"):
    """Options that define the games."""

    game: Literal["guess", "shop"] = option("guess", "guess a number, or sell to a customer with a hidden limit")
    pretrained: str | None = option(
        None, "name or folder of the chat model that plays, whose template writes the rows; none: characters"
    )


@with_defaults(games=2000)
class GamesData(WordGames, DataOptions):
    """Generate a dataset of a scripted player, who plays a game in words not well."""


@dataclass(frozen=True, kw_only=True)
class GamesPlay(WordGames, PlayOptions):
    """Guess a number or sell things yourself, or watch a policy."""
