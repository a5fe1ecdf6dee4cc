"""Split TextWorld games into training, validation and test sets that share no solution."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang._files import read_json

__all__ = ["Apart", "GameSets", "solution", "split_games"]

Apart = Literal["solutions", "games"]


@dataclass(frozen=True)
class GameSets:
    """Files of games in three sets."""

    train: tuple[Path, ...]
    valid: tuple[Path, ...]
    test: tuple[Path, ...]


def solution(game: Path) -> str:
    """The commands of a game's walkthrough, one a line, from the ``.json`` beside its file."""
    return "\n".join(_content(game)["metadata"]["walkthrough"])


def split_games(games: Sequence[Path], *, valid: int, test: int, apart: Apart = "solutions", seed: int = 0) -> GameSets:
    """Split games so that equal solutions (or equal games) are in one set.

    ``test`` is filled first, then ``valid``; all other games are for training. Groups of games are ordered by a hash,
    so the split is the same on every machine and independent of what the games are like.

    Args:
        games: files of games.
        valid: minimal number of validation games.
        test: minimal number of test games.
        apart: two sets have no solution in common, or merely no game (world, words and solution).
        seed: another seed gives another split.

    Raises:
        ValueError: no game is left for training.
    """
    groups: dict[bytes, list[Path]] = {}
    salt = f"{seed}\n" if seed else ""
    for game in games:
        common = solution(game) if apart == "solutions" else _whole(game)
        groups.setdefault(hashlib.sha256((salt + common).encode()).digest(), []).append(game)
    sets: dict[str, list[Path]] = {"test": [], "valid": [], "train": []}
    wanted = {"test": test, "valid": valid, "train": len(games)}
    for _, members in sorted(groups.items()):
        sets[next(name for name, chosen in sets.items() if len(chosen) < wanted[name])] += members
    if not sets["train"]:
        raise ValueError(
            f"{len(games)} games, {len(groups)} when {apart} are apart, leave none to learn from besides valid={valid} "
            f"and test={test}: build more games, or evaluate on fewer."
        )
    return GameSets(**{name: tuple(sorted(chosen)) for name, chosen in sets.items()})


def _whole(game: Path) -> str:
    """The game without its random seeds."""
    content = {key: value for key, value in _content(game).items() if key != "metadata"}
    return json.dumps([content, solution(game)], sort_keys=True)


def _content(game: Path) -> dict[str, Any]:
    return read_json(game.with_suffix(".json"), remedy=f"delete {game}, it is then built again")
