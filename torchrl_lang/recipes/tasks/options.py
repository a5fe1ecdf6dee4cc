"""Options that all tasks share. Nothing here imports torch, and nor do the options of this package's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_lang.recipes.options import Options, option, required


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Base of the options of ``generate TASK``."""

    out: Path = required("folder of the dataset")
    games: int = option(10_000, "number of games", ge=1)
    batch: int = option(1024, "games played in parallel", ge=1)
    seed: int = option(0, "seed of games and players", ge=0)
    overwrite: bool = option(False, "replace an existing dataset")

    def task(self) -> Any:
        """The :class:`Task` that the options describe."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """Notes for the manifest beside the task, as JSON."""
        return {"batch": self.batch, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class PlayOptions(Options):
    """Base of the options of ``play TASK``."""

    watch: str | None = option(None, "watch instead of playing: the folder of a finished run, or a scripted player")
    beta: float = option(4.0, "weight of the learned values in a watched run", ge=0)
    games: int = option(3, "games to watch", ge=1)
    seed: int | None = option(None, "seed of the games; none: a new one each time", ge=0)

    def task(self) -> Any:
        """The :class:`Task` that the options describe; a watched run has its own."""
        raise NotImplementedError
