"""Options and presets of TextWorld."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, Options, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import task_class

_WORLD = re.compile(r"w(?P<world_size>[1-9]\d*)-o(?P<nb_objects>[1-9]\d*)-q(?P<quest_length>[1-9]\d*)")
_OFFLINE: Mapping[str, Any] = {
    "steps": 700,
    # The engine has a large vocabulary, and what it writes about one game does not help in the next.
    "transition_weight": 0.05,
    "weight_decay": 0.05,
    "batch_size": 32,
    "eval_every": 350,
    "eval_games": 64,
}
_ONLINE: Mapping[str, Any] = {"games": 192, "turns": 12, "turn_gamma": 0.95, "eval_games": 96}
PRESETS: dict[str, dict[str, Any]] = {
    "bc": {**_OFFLINE},
    "ilql": {**_OFFLINE, "beta": 2.0},
    # A policy that imitates experts rarely fails, so a batch is mostly noise: small steps, many games.
    "ppo": {
        **{**_ONLINE, "iterations": 40, "epochs": 4, "lr": 5e-5},
        **{"kl_coef": 0.1, "kl_target": 1.5, "kl_horizon": 2000},
    },
    "rejection": {
        **{**_ONLINE, "iterations": 30, "epochs": 2, "lr": 2e-4, "batch_size": 32},
        **{"kl_target": 2.0, "kl_horizon": 1000, "fraction": 0.5},
    },
    "evaluate": {"beta": (0.0, 1.0, 4.0)},
}


@dataclass(frozen=True, kw_only=True)
class TextWorldGames(Options, group="data"):
    """Options that define the games."""

    kind: Literal["simple", "coin_collector", "treasure_hunter", "cooking", "custom"] = option(
        "coin_collector", "the engine's kind of game"
    )
    level: int | None = option(None, "level of coin_collector and treasure_hunter; none takes 5", ge=1)
    world: str | None = option(
        None, "size of a custom game as w2-o3-q4: rooms, objects, commands of the quest; none takes w2-o4-q3"
    )
    games: int = option(400, "number of games to build, once: each takes a core 1 to 3 seconds", ge=1)
    first_game: int = option(0, "seed of the first game; the others follow; also the seed of the split", ge=0)
    valid: int = option(32, "least number of games for evaluations during training", ge=1)
    test: int = option(48, "least number of games for the final evaluation", ge=1)
    apart: Literal["solutions", "games"] = option(
        "solutions", "what the splits do not share: the winning commands of a game, or merely whole games"
    )
    template: str | None = option(
        None,
        "what observations hold: exits, rooms, orders, short, lower, plain, commands or state; none takes what fits "
        "the kind",
    )
    row_length: int | None = option(None, "tokens of a row; none takes what fits the kind", ge=1)
    action_length: int | None = option(None, "tokens of a command with its end; none takes what fits the kind", ge=1)
    max_turns: int | None = option(None, "turns of an episode; none takes what fits the kind", ge=1)
    exchange: bool = option(
        False, "exchange the words of names in each training episode, so that few games teach to copy names"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = {"coin_collector": 300, "treasure_hunter": 30}
        if self.level is not None and not self.level <= levels.get(self.kind, 0):
            known = " and ".join(f"1 to {most} for {kind}" for kind, most in levels.items())
            raise ValueError(f"There is no --level {self.level} of {self.kind}: levels are {known}.")
        if self.world is not None and (self.kind != "custom" or not _WORLD.fullmatch(self.world)):
            form = "w2-o3-q4, all numbers at least 1"
            raise ValueError(f"There is no --world {self.world} of {self.kind}: write --kind custom --world {form}.")

    def task(self) -> Any:
        """The task."""
        names = ("games", "valid", "test", "apart", "template", "row_length", "action_length", "max_turns", "exchange")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        kind: Any = task_class("textworld")
        options = {} if self.level is None else {"level": self.level}
        if found := _WORLD.fullmatch(self.world or ""):
            options = {name: int(number) for name, number in found.groupdict().items()}
        return kind.of(self.kind, options=options, seed=self.first_game, **given)


@with_defaults(batch=96)
class TextWorldData(TextWorldGames, DataOptions):
    """Generate a dataset of TextWorld games by experts, some of whom make random moves."""

    episodes: int = option(2000, "episodes to play", ge=1)
    copies: int = option(
        1, "times to write each episode, each time with other names, to learn from few; needs --exchange", ge=1
    )
    epsilon: tuple[float, ...] = option(
        (0.0, 0.1, 0.2), "shares of random commands, one expert for each; they play equally often", ge=0, le=1
    )
    foreign: float = option(
        0.0, "share of the random commands taken from another game, most often impossible", ge=0, le=1
    )
    first_command: str | None = option(
        None, "command of each episode's first turn, such as inventory: it lists keys that no other text names"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies > 1 and not self.exchange:
            raise ValueError(f"--copies {self.copies} without --exchange writes equal episodes: add --exchange.")

    def notes(self) -> dict[str, Any]:
        """Settings of the episodes beside the task."""
        options = {
            "episodes": self.episodes,
            "copies": self.copies,
            "foreign": self.foreign,
            "first_command": self.first_command,
            "batch": self.batch,
            "seed_of_play": self.seed,
        }
        return {"epsilon": list(self.epsilon), **options}


@with_defaults(games=12, valid=1, test=1)
class TextWorldPlay(TextWorldGames, PlayOptions):
    """Play a TextWorld game in the terminal, or watch a policy."""
