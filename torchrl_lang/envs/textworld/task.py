"""TextWorld as a task of the recipes."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, get_args

from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang._files import Fields, shorten
from torchrl_lang.envs.textworld import (
    TEMPLATES,
    ExpertPlayer,
    GameSets,
    RandomAdmissiblePlayer,
    TextWorldEnv,
    TextWorldSpec,
    build_games,
    game_texts,
    split_games,
    word_tokenizer,
)
from torchrl_lang.envs.textworld.game_sets import Apart
from torchrl_lang.envs.textworld.games import Kind
from torchrl_lang.evaluation import GameRecords, Summary
from torchrl_lang.recipes.options import Options, option, with_defaults
from torchrl_lang.recipes.tasks.base import DataOptions, Player, PlayOptions, Task
from torchrl_lang.text import CharTokenizer

__all__ = ["TextWorldData", "TextWorldPlay", "TextWorldTask"]

_BY_KIND: dict[str, dict[str, Any]] = {
    "coin_collector": {"template": "exits", "row_length": 192, "action_length": 4, "max_turns": 15},
    "simple": {"template": "orders", "row_length": 512, "action_length": 12, "max_turns": 25},
}
"""Template and limits for each kind of game."""
_OTHER_KINDS = {"template": "short", "row_length": 1024, "action_length": 16, "max_turns": 30}

_OFFLINE: Mapping[str, Any] = {
    "steps": 700,
    # The engine has a large vocabulary, and what it writes about one game does not help in the next.
    "transition_weight": 0.05,
    "weight_decay": 0.05,
    "batch_size": 32,
    "eval_every": 350,
    "eval_games": 64,
}


@dataclass(frozen=True, kw_only=True)
class TextWorldGames(Options):
    """Options that define the games."""

    kind: Kind = option("coin_collector", "the engine's kind of game")
    level: int | None = option(None, "level of coin_collector and treasure_hunter; none takes 5", at_least=1)
    games: int = option(400, "games to build, 1 to 3 seconds each and core, once for all", at_least=1)
    first_game: int = option(0, "seed of the first game; the others follow; also the seed of the split", at_least=0)
    valid: int = option(32, "least number of games for evaluations during training", at_least=1)
    test: int = option(48, "least number of games for the final evaluation", at_least=1)
    apart: Apart = option("solutions", "what the splits do not share: winning commands, or merely whole games")
    template: str | None = option(None, "template of observations; none takes what fits the kind")
    row_length: int | None = option(None, "tokens of a row; none takes what fits the kind", at_least=1)
    action_length: int | None = option(
        None, "tokens of a command, its end included; none takes what fits the kind", at_least=1
    )
    max_turns: int | None = option(None, "turns of an episode; none takes what fits the kind", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = {"coin_collector": 300, "treasure_hunter": 30}
        if self.level is not None and not self.level <= levels.get(self.kind, 0):
            known = " and ".join(f"1 to {most} for {kind}" for kind, most in levels.items())
            raise ValueError(f"There is no level {self.level} of {self.kind}: levels are {known}.")

    def task(self) -> TextWorldTask:
        """The task."""
        limits = {name: getattr(self, name) for name in ("template", "row_length", "action_length", "max_turns")}
        return TextWorldTask.of(
            self.kind,
            options={} if self.level is None else {"level": self.level},
            games=self.games,
            seed=self.first_game,
            valid=self.valid,
            test=self.test,
            apart=self.apart,
            **{name: value for name, value in limits.items() if value is not None},
        )


@with_defaults(batch=96)
class TextWorldData(TextWorldGames, DataOptions):
    """Generate a dataset of TextWorld games by experts, some of whom make random moves."""

    episodes: int = option(2000, "episodes to play", at_least=1)
    epsilon: tuple[float, ...] = option(
        (0.0, 0.1, 0.2),
        "shares of random commands, one expert for each; they play equally often",
        at_least=0,
        at_most=1,
    )
    foreign: float = option(
        0.0, "share of the random commands taken from another game, most often impossible", at_least=0, at_most=1
    )

    def behavior_policy(self, task: Task) -> Player:
        """The experts."""
        return Player(
            ExpertPlayer(epsilon=self.epsilon, foreign=self.foreign, seed=self.seed),
            {"offers": ("expert", "admissible")},
        )

    def number_of_episodes(self) -> int:
        """Number of episodes."""
        return self.episodes

    def notes(self) -> dict[str, Any]:
        """What the episodes depend on beside the task."""
        options = {"foreign": self.foreign, "batch": self.batch, "seed_of_play": self.seed}
        return {"epsilon": list(self.epsilon), **options}


@with_defaults(games=12, valid=1, test=1)
class TextWorldPlay(TextWorldGames, PlayOptions):
    """Play a TextWorld game in the terminal, or watch a policy."""


@dataclass(frozen=True)
class TextWorldTask(Task):
    """Games built by TextWorld, split into training, validation and test games.

    The games of the seeds ``seed``, ``seed + 1``, ... are built and split by their *solutions* (the commands of the
    engine's walkthrough), so that no evaluated game can be won by a memorized sequence of commands. The number of
    solutions is the engine's: 108 corridors of ``coin_collector`` at level 5; 36 ways to cook in ``simple``. Games with
    one solution differ in the wording of objective and rooms. With ``apart="games"`` only equal games stay together.

    The tokenizer has the words of the training games and spells other words letter by letter. ``options`` are those of
    the ``kind`` of :class:`~torchrl_lang.envs.textworld.TextWorldSpec`, such as ``{"level": 5}``, as sorted pairs;
    :meth:`of` takes a mapping. The other fields are described in :class:`TextWorldGames`.

    Raises:
        ValueError: unknown kind, option, template or ``apart``; later, when games are built, too few for training.
    """

    name: ClassVar[str] = "textworld"
    data_options = TextWorldData
    play_options = TextWorldPlay
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "bc": _OFFLINE,
        "ilql": {**_OFFLINE, "beta": 2.0},
        # A policy that imitates experts rarely fails, so a batch is mostly noise: small steps, many games.
        "ppo": {
            "iterations": 40,
            "games": 192,
            "turns": 12,
            "epochs": 4,
            "lr": 5e-5,
            "kl_coef": 0.1,
            "kl_target": 1.5,
            "kl_horizon": 2000,
            "turn_gamma": 0.95,
            "eval_games": 96,
        },
        "rejection": {
            "iterations": 30,
            "games": 192,
            "turns": 12,
            "epochs": 2,
            "batch_size": 32,
            "lr": 2e-4,
            "kl_target": 2.0,
            "kl_horizon": 1000,
            "eval_games": 96,
            "fraction": 0.5,
            "turn_gamma": 0.95,
        },
        "evaluate": {"beta": (0.0, 1.0, 4.0)},
    }
    baselines = ("random", "expert")
    turns_name = "commands"
    splits = ("test", "valid", "train")
    kept_entries = ("won",)

    kind: Any = "coin_collector"
    options: tuple[tuple[str, Any], ...] = ()
    games: int = 400
    valid: int = 32
    test: int = 48
    seed: int = 0
    apart: Apart = "solutions"
    template: str = "exits"
    row_length: int = 192
    action_length: int = 4
    max_turns: int = 15

    def __post_init__(self) -> None:
        one_of("apart", self.apart, get_args(Apart))
        one_of("template", self.template, tuple(TEMPLATES))
        if any(not isinstance(value, (str, int, float, type(None))) for _, value in self.options):
            raise ValueError(f"The options of a kind of games are plain values, got {shorten(self.options)}.")
        try:
            TextWorldSpec(self.kind, **dict(self.options))
        except TypeError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def of(cls, kind: str, *, options: Mapping[str, Any] | None = None, **fields: Any) -> TextWorldTask:
        """Games of a kind, with the template and the limits that fit the kind where ``fields`` do not give others.

        Examples:
            >>> from torchrl_lang.envs.textworld.task import TextWorldTask
            >>> from torchrl_lang._files import Fields
            >>> task = TextWorldTask.of("coin_collector", options={"level": 5}, games=100, valid=16, test=16)
            >>> notes = Fields(task.notes(), "config.json", "train again")
            >>> task.template, TextWorldTask.from_notes(notes) == task
            ('exits', True)
        """
        pairs = tuple(sorted((options or {}).items()))
        return cls(kind, pairs, **{**_BY_KIND.get(kind, _OTHER_KINDS), **fields})

    @classmethod
    def from_notes(cls, notes: Fields) -> TextWorldTask:
        """See :meth:`Task.from_notes`."""
        numbers = {name: notes.at_least(name, 1) for name in ("games", "row_length", "action_length", "max_turns")}
        numbers |= {name: notes.at_least(name, 0) for name in ("valid", "test", "seed")}
        words = {name: notes.take(name, str) for name in ("kind", "template", "apart")}
        options = tuple(sorted(notes.take("options", dict).items()))
        return cls(options=options, **words, **numbers)  # type: ignore[arg-type]

    def notes(self) -> dict[str, Any]:
        """See :meth:`Task.notes`."""
        return {**super().notes(), "options": dict(self.options)}

    def specs(self) -> list[TextWorldSpec]:
        """The games to build."""
        return [TextWorldSpec(self.kind, self.seed + n, **dict(self.options)) for n in range(self.games)]

    @lru_cache(maxsize=8)  # noqa: B019  # equal tasks have the same games
    def sets(self) -> GameSets:
        """The files of the splits; games that do not exist yet are built."""
        games = build_games(self.specs())
        return split_games(games, valid=self.valid, test=self.test, apart=self.apart, seed=self.seed)

    @lru_cache(maxsize=8)  # noqa: B019
    def tokenizer(self) -> CharTokenizer:
        """The words of the training games, from a file beside them, because collecting them means playing all games."""
        games, template = self.sets().train, TEMPLATES[self.template]
        content = [[game.name for game in games], repr(template), word_tokenizer(["a, b"]).config()]
        path = games[0].with_name(f"words-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]}.json")
        if not path.exists():
            tokenizer = word_tokenizer(game_texts(games, template, workers=os.cpu_count() or 1, steps=200))
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".writing", delete=False) as file:
                json.dump(tokenizer.config(), file)
            os.replace(file.name, path)
        return CharTokenizer.from_config(json.loads(path.read_text(encoding="utf-8")))

    def env(self, batch_size: int, *, split: str = "train", **options: Any) -> TextWorldEnv:
        """The environment on the games of a split."""
        fixed = {name: getattr(self, name) for name in ("template", "row_length", "action_length", "max_turns")}
        return TextWorldEnv(
            getattr(self.sets(), split), self.tokenizer(), batch_size=[batch_size], **{**fixed, **options}
        )

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: admissible commands, uniformly; ``"expert"``: the engine's walkthrough."""
        one_of("player", name, self.baselines)
        if name == "random":
            return Player(RandomAdmissiblePlayer(seed=seed), {"offers": "admissible"})
        return Player(ExpertPlayer(), {"offers": "expert"}, is_random=False)

    def evaluate(self, policy: Any, **options: Any) -> tuple[Summary, GameRecords]:
        """Play the games of a split, by default ``"valid"``, in order; see :meth:`Task.evaluate`."""
        return super().evaluate(policy, **{"split": "valid", "order": "cycle", **options})

    def won(self, records: GameRecords) -> Tensor:
        """Games that the engine counts as won, bool ``[N]``.

        Raises:
            KeyError: the records do not contain ``won``.
        """
        won = records.kept.get("won", None)
        if won is None:
            raise KeyError("The records do not contain 'won': play the games with play_games(..., keep=['won']).")
        return won

    def number_of_games(self, split: str | None) -> int:
        """Number of games in a split."""
        return len(getattr(self.sets(), split or self.splits[0]))
