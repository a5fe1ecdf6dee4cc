"""A task of the recipes: its games, its scripted players, its metrics, its datasets and its presets."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from pydantic import TypeAdapter
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang._checks import check_options
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs import LanguageEnv
from torchrl_lang.evaluation import GameRecords, KnownValues, Summary, format_transcript, play_games, summarize
from torchrl_lang.evaluation.metrics import solved
from torchrl_lang.recipes.options import DataOptions, PlayOptions
from torchrl_lang.schema import ACTION, CONTINUED, DONE, FEATURES, REWARD, ROW_KEYS
from torchrl_lang.text import Tokenizer
from torchrl_lang.text.chat_tokenizer import encode_action, padded_action

T = TypeVar("T")


class Player(NamedTuple):
    """A scripted policy, and the options of :meth:`Task.env` that it needs."""

    policy: TensorDictModuleBase
    env_options: Mapping[str, Any] = {}
    is_random: bool = True
    """Whether it may play the same game differently a second time."""


def named_player(name: str, players: Mapping[str, T]) -> T:
    """Look up a player, what makes it, or what distinguishes it from the others, by its name.

    Raises:
        ValueError: there is none of that name.
    """
    check_options(player=(name, players))
    return players[name]


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
    evaluated: ClassVar[Mapping[str, Any]] = {}
    """Options of :meth:`env` that :meth:`evaluate` gives, unless it is given others."""
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
        with closing(self.env(1)) as env:
            return _size_of_features(env)

    @abstractmethod
    def player(self, name: str, seed: int | None = None) -> Player:
        """A scripted player by name. Every task has ``"random"``: random valid actions.

        Raises:
            ValueError: the name is unknown.
        """

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Self:
        """The task from what :meth:`notes` wrote.

        Raises:
            ValueError: a field is missing, of another type, or out of range.
        """
        recorded = {field.name: notes[field.name] for field in fields(cls) if field.name in notes}
        return TypeAdapter(cls).validate_json(json.dumps(recorded), strict=True)

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

    def behavior_policy(self, options: Any) -> Player:
        """Who plays the games of a dataset with these options of ``generate``."""
        return self.player("random", options.seed)

    def maker(self, options: Any) -> EpisodeSampler | None:
        """Sampler of the games, if it is not one player: it is written in parts, and the same command resumes."""
        return None

    def number_of_episodes(self, options: Any) -> int:
        """Number of episodes of a dataset with these options of ``generate``."""
        return options.games

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
        with closing(self.env(min(batch, games), device=device, **{**self.evaluated, **options})) as env:
            if FEATURES in getattr(policy, "in_keys", ()) and _size_of_features(env) is None:
                raise ValueError(
                    f"The policy reads features, which the games of {self.name!r} do not show: play others."
                )
            records = play_games(env, policy, games=games, seed=seed, keep=self.kept_entries)
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
        play_in_terminal(self.env(1, seed=seed), spelling=self.spelling)

    def watch(self, player: Player, *, games: int, seed: int) -> None:
        """Print games of a player."""
        _, records = self.evaluate(player.policy, games=games, seed=seed, **player.env_options)
        for row in records.rows:
            print(format_transcript(row, self.tokenizer(), spelling=self.spelling), end="\n\n")


def _size_of_features(env: EnvBase) -> tuple[int, int] | None:
    """``(P, F)`` of the features that an environment shows; None if it shows none."""
    spec = env.observation_spec
    return tuple(spec[FEATURES].shape[-2:]) if FEATURES in spec.keys() else None


def check_tokenizer(task: Task, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError unless the dataset or model in ``folder`` has the task's current tokenizer."""
    if task.tokenizer().config() != tokenizer.config():
        raise ValueError(f"{folder} was made with another tokenizer than {task.name!r} has: generate and train again.")


def check_features(task: Task, width: int | None, source: Path) -> None:
    """Raise ValueError unless the games show features of the width of those that ``source``, data or a run, has."""
    shown = (task.features() or (0, None))[1]
    if shown != width:
        raise ValueError(f"The games of {task.name!r} show features of width {shown}, not {width} as {source} has.")


def play_in_terminal(
    env: LanguageEnv, *, spelling: Mapping[str, str] | None = None, input_fn: Callable[[str], str] = input
) -> float | None:
    """Let a person play one game: each line typed is an action; ``q`` or the end of the input quits.

    Args:
        env: an environment of one game.
        spelling: symbols to write differently, as in :func:`~torchrl_lang.evaluation.format_transcript`.
        input_fn: asks for a line, as :func:`input` does.

    Returns:
        The return of the game, ``None`` if the person quit.

    Examples:
        >>> from torchrl_lang.envs.random_walks import RandomWalksEnv, random_graph
        >>> from torchrl_lang.recipes.tasks.base import play_in_terminal
        >>> env = RandomWalksEnv(random_graph(5, out_degree=2, seed=0), batch_size=[1], seed=1)
        >>> moves = iter("da")
        >>> play_in_terminal(env, input_fn=lambda prompt: next(moves))
        < c
        > d  (-1)
        < d
        > a  (-1)
        < a
        The game is over, return -2.
        -2.0
    """
    td, shown, total = env.reset(), 0, 0.0
    while True:
        lines = format_transcript(td[0].select(*ROW_KEYS).cpu(), env.tokenizer, spelling=spelling).splitlines()
        print("\n".join(lines[shown:]))
        shown = len(lines)
        if bool(td[DONE].all()):
            if CONTINUED not in td.keys() or not env.continues.all():
                print(f"The game is over, return {total:g}.")
                return total
            td = env.reset(td.set("_reset", td[DONE].clone()))
            shown = len(format_transcript(td[0].select(*ROW_KEYS).cpu(), env.tokenizer).splitlines())
        tokens = _ask(env, input_fn)
        if tokens is None:
            return None
        td[ACTION] = torch.tensor([tokens], device=env.device)
        td = env.step(td)["next"]
        total += float(td[REWARD].sum())


def _ask(env: LanguageEnv, input_fn: Callable[[str], str]) -> list[int] | None:
    """The tokens of an action, padded; ``None`` to quit."""
    while True:
        try:
            text = input_fn("> ").strip()
        except EOFError:
            return None
        if text == "q":
            return None
        try:
            action = padded_action(env.tokenizer, text, env.action_length)
        except ValueError as error:
            print(error)
            continue
        if action is not None:
            return action
        number = len(encode_action(env.tokenizer, text))
        print(f"An action has at most {env.action_length - 1} tokens, {text!r} has {number}.")
