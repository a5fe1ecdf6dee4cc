"""Options and presets of twenty questions and guess my city."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import GamesOptions

PRESETS: dict[str, dict[str, Any]] = {"evaluate": {"beta": (0.0, 2.0, 4.0, 8.0)}}


@dataclass(frozen=True, kw_only=True)
class QuestionsGames(GamesOptions, of_task="questions"):
    """Options that define the games."""

    subject: Literal["things", "cities"] = option("things", "what is to be found out: one of 233 things or 125 cities")


@with_defaults(games=20_000)
class QuestionsData(QuestionsGames, DataOptions):
    """Generate a dataset of a scripted player who asks in order to find out a thing."""

    skill: float = option(0.5, "share of questions that are the most informative ones; the others are any", ge=0, le=1)

    def notes(self) -> dict[str, Any]:
        """Settings of the games beside the task."""
        return {"skill": self.skill, **super().notes()}


@dataclass(frozen=True, kw_only=True)
class QuestionsPlay(QuestionsGames, PlayOptions):
    """Ask questions yourself, or watch a policy."""
