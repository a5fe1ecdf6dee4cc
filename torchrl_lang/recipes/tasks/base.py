"""A task of the recipes: its games, its scripted players, its metrics, its datasets and its presets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang._files import Fields
from torchrl_lang.data import GameMaker
from torchrl_lang.envs import LanguageEnv
from torchrl_lang.evaluation import GameRecords, KnownValues, Summary, play_games, solved, summarize
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.schema import FEATURES
from torchrl_lang.text import Tokenizer

__all__ = ["DataOptions", "PlayOptions", "Player", "Task"]


class Player(NamedTuple):
    """A scripted policy, and the options of :meth:`Task.env` that it needs."""

    policy: TensorDictModuleBase
    env_options: Mapping[str, Any] = {}
    is_random: bool = True
    """Whether it may play the same game differently a second time."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Base of the options of ``generate TASK``."""

    out: Path = required("folder of the dataset")
    games: int = option(10_000, "number of games", at_least=1)
    batch: int = option(1024, "games played in parallel", at_least=1)
    seed: int = option(0, "seed of games and players", at_least=0)
    overwrite: bool = option(False, "replace an existing dataset")

    def task(self) -> Task:
        """The task that the options describe."""
        raise NotImplementedError

    def behavior_policy(self, task: Task) -> Player:
        """Who plays the games."""
        return task.player("random", self.seed)

    def maker(self, task: Task) -> GameMaker | None:
        """What makes the games, if it is not one player: it is written in parts, and the same command resumes."""
        return None

    def number_of_episodes(self) -> int:
        """Number of episodes to generate."""
        return self.games

    def notes(self) -> dict[str, Any]:
        """What the manifest records beside the task, as JSON."""
        return {"batch": self.batch, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class PlayOptions(Options):
    """Base of the options of ``play TASK``."""

    watch: str | None = option(None, "watch instead of playing: the folder of a finished run, or a scripted player")
    beta: float = option(4.0, "weight of the learned values in a watched run", at_least=0)
    games: int = option(3, "games to watch", at_least=1)
    seed: int | None = option(None, "seed of the games; default: a new one each time", at_least=0)

    def task(self) -> Task:
        """The task that the options describe; a watched run has its own."""
        raise NotImplementedError


@dataclass(frozen=True)
class Task(ABC):
    """Games to play and how to evaluate a policy on them.

    A subclass is a frozen dataclass whose fields define the games. It can be pickled, and :meth:`notes` and
    :meth:`from_notes` store it in datasets and runs.
    """

    name: ClassVar[str]
    data_options: ClassVar[type[DataOptions]]
    play_options: ClassVar[type[PlayOptions]]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Option values for this task by recipe (``"bc"``, ``"ilql"``, ..., ``"evaluate"``), where they differ from the
    defaults."""
    baselines: ClassVar[tuple[str, ...]] = ()
    """Scripted players that an evaluation shows beside the policy."""
    splits: ClassVar[tuple[str, ...]] = ()
    """Sets of games that :meth:`env` takes as ``split``; the first is the default of ``evaluate``."""
    kept_entries: ClassVar[tuple[str, ...]] = ()
    """Entries of the last observation that :meth:`won` needs."""
    turns_name: ClassVar[str] = "turns"
    """The word for the turns of a game in an evaluation, such as ``"guesses"``."""
    metric_meanings: ClassVar[Mapping[str, str]] = {}
    """The meaning of each metric of :meth:`summary`, for the legend of a table."""
    spelling: ClassVar[Mapping[str, str] | None] = None
    """Symbols to write differently in transcripts."""

    @property
    @abstractmethod
    def action_length(self) -> int:
        """Number of tokens of an action, its end included."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the games."""

    @abstractmethod
    def env(self, batch_size: int, **options: Any) -> LanguageEnv:
        """The environment; options such as ``seed`` and ``device`` go to its class."""

    def features(self) -> tuple[int, int] | None:
        """``(P, F)``, number and width of the features that the games show beside their texts; None if they show none.

        See :attr:`~torchrl_lang.schema.FEATURES`; this opens an environment.
        """
        env = self.env(1)
        try:
            return _size_of_features(env)
        finally:
            env.close(raise_if_closed=False)

    @abstractmethod
    def player(self, name: str, seed: int | None = None) -> Player:
        """A scripted player by name. Every task has ``"random"``: random valid actions.

        Raises:
            ValueError: the name is unknown.
        """

    @classmethod
    @abstractmethod
    def from_notes(cls, notes: Fields) -> Self:
        """The task from what :meth:`notes` wrote.

        Raises:
            ValueError: a field is missing, of another type, or out of range.
        """

    @classmethod
    def without_notes(cls) -> Self:
        """The task for data that record none, such as dialogues in a file: all fields have their defaults.

        Raises:
            ValueError: a field has no default.
        """
        try:
            return cls()
        except TypeError as error:
            raise ValueError(f"The task {cls.name} cannot be made without a dataset of it ({error}).") from error

    def notes(self) -> dict[str, Any]:
        """The task as JSON, for a dataset's manifest or a run's record."""
        return {"task": self.name, **asdict(self)}

    def evaluate(
        self,
        policy: Any,
        *,
        games: int,
        seed: int,
        name: str = "",
        batch: int = 256,
        device: Any = None,
        **options: Any,
    ) -> tuple[Summary, GameRecords]:
        """Play a fixed set of games, ``batch`` in parallel, and summarize them.

        ``name`` is that of the policy in tables; ``device`` and ``options`` go to :meth:`env`.
        """
        env = self.env(min(batch, games), device=device, **options)
        if FEATURES in getattr(policy, "in_keys", ()) and _size_of_features(env) is None:
            raise ValueError(
                f"The policy reads features, which the games of the task {self.name!r} do not show: give the "
                "environment features=(P, F), or a policy that was trained without."
            )
        try:
            records = play_games(env, policy, games=games, seed=seed, keep=self.kept_entries)
        finally:
            env.close()
        return self.summary(records, name), records

    def won(self, records: GameRecords) -> Tensor:
        """Games that count as won, bool ``[N]``."""
        return solved(records)

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of games."""
        return summarize(records, name=name, won=self.won)

    def number_of_games(self, split: str | None) -> int | None:
        """Number of different games in a split; ``None`` where games are drawn without end."""
        return None

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """States among those of ``rows`` in which exact values of utterances are known; none by default.

        :func:`~torchrl_lang.evaluation.value_report` compares learned values with them.
        """
        return []

    def play(self, seed: int) -> None:
        """Let a person play one game in the terminal."""
        from torchrl_lang.recipes.play import play_in_terminal

        play_in_terminal(self.env(1, seed=seed), spelling=self.spelling)

    def watch(self, player: Player, *, games: int, seed: int) -> None:
        """Print games of a player."""
        from torchrl_lang.evaluation import format_transcript

        _, records = self.evaluate(player.policy, games=games, seed=seed, **player.env_options)
        for row in records.rows:
            print(format_transcript(row, self.tokenizer(), spelling=self.spelling), end="\n\n")


def _size_of_features(env: EnvBase) -> tuple[int, int] | None:
    """``(P, F)`` of the features that an environment shows; None if it shows none."""
    spec = env.observation_spec
    return tuple(spec[FEATURES].shape[-2:]) if FEATURES in spec.keys() else None
