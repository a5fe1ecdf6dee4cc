"""Tasks of users: a subclass of Task or any environment factory, named as ``package.module:name``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from traceback import extract_tb
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_lang._files import one_line, shorten
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs import LanguageEnv, TextPlayer
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.options import Options, option, pairs
from torchrl_lang.recipes.tasks.base import DataOptions, Player, PlayOptions, Task, named_player
from torchrl_lang.schema import ACTION, TOKENS, ControlTokens
from torchrl_lang.text import Tokenizer

EnvFactory = Callable[..., LanguageEnv]
"""Called as ``make_env(batch_size=8, seed=0, device=None, **options)``."""

SIGNATURE = "a function make_env(batch_size, *, seed=None, device=None, **options) that returns a LanguageEnv"


@dataclass(frozen=True, kw_only=True)
class EnvGames(Options):
    """Options of an environment factory."""

    kind: ClassVar[type[EnvTask]]

    option: dict[str, Any] = pairs("options of the environment factory: JSON values, other values are texts")

    def task(self) -> EnvTask:
        """The task, whose class has the options as those that were given."""
        return env_task(self.kind.name, self.kind.factory, self.option)(dict(self.option))


@dataclass(frozen=True, kw_only=True)
class EnvData(EnvGames, DataOptions):
    """Generate a dataset in an environment, of random tokens or of a player of yours."""

    player: str | None = option(
        None, "module:name of a function play(texts, rng), from the texts of a game so far to the agent's next text"
    )

    def notes(self) -> dict[str, Any]:
        """See :meth:`DataOptions.notes`."""
        return super().notes() if self.player is None else {**super().notes(), "player": self.player}


@dataclass(frozen=True, kw_only=True)
class EnvPlay(EnvGames, PlayOptions):
    """Play in an environment in the terminal, or watch a policy."""


@dataclass(frozen=True)
class EnvTask(Task):
    """The games of an environment factory. Abstract: :func:`env_task` makes a subclass for each factory.

    A game counts as won if it terminated with a positive reward in its last turn.

    Args:
        options: of the factory, as JSON.

    Raises:
        ValueError: later, the factory raises an error, or returns something other than a language environment of the
            batch size.
    """

    factory: ClassVar[EnvFactory]
    given: ClassVar[Mapping[str, Any]] = {}
    """Options that the user gave; those of a dataset or run must be the same."""
    baselines = ("random",)

    options: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        # The class is made by a function, so that pickle cannot find it by its name.
        return _restore, (self.name, type(self).factory, dict(self.options))

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Self:
        """See :meth:`Task.from_notes`."""
        options = super().from_notes(notes).options
        if cls.given and cls.given != options:
            raise ValueError(f"its options are {shorten(options)}, not {shorten(cls.given)}: omit --option")
        return cls(options)

    @classmethod
    def without_notes(cls) -> Self:
        """See :meth:`Task.without_notes`: the options that the user gave."""
        return cls(dict(cls.given))

    def env(self, batch_size: int, **options: Any) -> LanguageEnv:
        """See :meth:`Task.env`."""
        try:
            # All three arguments of the recipes are given, so that no option of a user can have such a name.
            own: dict[str, Any] = {"batch_size": batch_size, "seed": None, "device": None, **options}
            env = type(self).factory(**own, **self.options)
        except Exception as error:
            raise ValueError(f"{self.name} failed ({describe_failure(error)}): expected {SIGNATURE}.") from error
        base = env.base_env if isinstance(env, TransformedEnv) else env
        if not isinstance(base, LanguageEnv):
            raise ValueError(f"{self.name} returned {shorten(env)}: expected {SIGNATURE}.")
        if env.batch_size != (batch_size,):
            raise ValueError(f"{self.name} has batch size {list(env.batch_size)}, expected [{batch_size}]: pass it on.")
        return env

    @cached_property
    def _example(self) -> tuple[Tokenizer, int]:
        """Tokenizer and length of an action of the environments."""
        with closing(self.env(1)) as env:
            return env.tokenizer, env.action_length

    @property
    def action_length(self) -> int:
        """See :meth:`Task.action_length`."""
        return self._example[1]

    def tokenizer(self) -> Tokenizer:
        """See :meth:`Task.tokenizer`."""
        return self._example[0]

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: random tokens."""
        kind = named_player(name, {"random": RandomTokens})
        return Player(kind(self.tokenizer().control, self.action_length, seed=seed))

    def behavior_policy(self, options: Any) -> Player:
        """See :meth:`Task.behavior_policy`: the function that ``--player`` names, or random tokens."""
        if options.player is None:
            return super().behavior_policy(options)
        play = import_object(options.player)
        if isinstance(play, type) or not callable(play):
            raise ValueError(f"--player {options.player} is {shorten(play)}: expected a function play(texts, rng).")
        return Player(TextPlayer(play, self.tokenizer(), self.action_length, seed=options.seed))

    def won(self, records: GameRecords) -> Tensor:
        """Games that terminated with a positive reward in the last turn, bool ``[N]``."""
        return records.terminated & (records.last_reward > 0)


def env_task(name: str, factory: EnvFactory, given: Mapping[str, Any] | None = None) -> type[EnvTask]:
    """Make a task of an environment factory.

    Args:
        name: recorded in datasets and runs; on the command line ``package.module:name`` of the factory.
        factory: called as ``factory(batch_size=8, seed=0, device=None, **options)``; returns a
            :class:`~torchrl_lang.envs.LanguageEnv`. The class of an environment is a factory, too. Worker processes
            need one that can be pickled, such as a function of a module.
        given: options of the factory.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.recipes.tasks.env_task import env_task
        >>> task = env_task("corridor", CorridorEnv)({"length": 3})
        >>> task.evaluate(task.player("random", seed=0).policy, games=8, seed=0)[0].games
        8
        >>> task.notes()
        {'task': 'corridor', 'options': {'length': 3}}
    """
    kind: Any = type("EnvTask", (EnvTask,), {"name": name, "factory": staticmethod(factory), "given": given or {}})
    kind.data_options = type("EnvData", (EnvData,), {"kind": kind, "__doc__": EnvData.__doc__})
    kind.play_options = type("EnvPlay", (EnvPlay,), {"kind": kind, "__doc__": EnvPlay.__doc__})
    return kind


def _restore(name: str, factory: EnvFactory, options: Mapping[str, Any]) -> EnvTask:
    return env_task(name, factory)(options)


class RandomTokens(TensorDictModuleBase):
    """Writes up to ``action_length - 1`` random tokens and the end of the action; every length is equally likely.

    Args:
        control: the control tokens of the environment; the agent's valid tokens are drawn uniformly.
        action_length: ``K``, tokens of an action, its end included.
        seed: seed of its random generator.

    Examples:
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.recipes.tasks.env_task import RandomTokens
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> env.rollout(2, RandomTokens(env.tokenizer.control, env.action_length, seed=0))["action"].shape
        torch.Size([4, 2, 2])
    """

    in_keys = [TOKENS]
    out_keys = [ACTION]

    def __init__(self, control: ControlTokens, action_length: int, *, seed: int | None = None) -> None:
        super().__init__()
        self._pad, self._end, self._length = control.pad, control.end_of_action, action_length
        excluded = {control.end_of_action, *control.forbidden_in_action()}
        self._valid = torch.tensor([token for token in range(control.vocab_size or 0) if token not in excluded])
        self.stream = RandomStream(seed)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``, int64 ``[*B, K]``."""
        shape, device = tensordict.get(TOKENS).shape[:-1], tensordict.get(TOKENS).device
        longest = self._length - 1 if len(self._valid) else 0
        length = self.stream.below(torch.full((*shape, 1), longest)) + (longest > 0)
        choice = self.stream.below(torch.full((*shape, self._length), len(self._valid)))
        tokens = self._valid[choice] if len(self._valid) else choice
        place = torch.arange(self._length)
        tokens = torch.where(place < length, tokens, torch.where(place == length, self._end, self._pad))
        return tensordict.set(ACTION, tokens.to(device))


def describe_failure(error: BaseException) -> str:
    """An error of a user's code as one line, with the place where it was raised."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""  # the first is the caller's
    return f"{type(error).__name__}: {one_line(error)}{place}"


def import_object(name: str) -> Any:
    """Import what ``package.module:name`` names; a ValueError with the reason where that fails."""
    place, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(place), attribute)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name} cannot be imported ({describe_failure(error)}): is it in this folder?") from error


def import_task(name: str, options: Mapping[str, Any]) -> type[Task]:
    """Import a :class:`Task` class, or make one of an environment factory.

    Args:
        name: ``package.module:name``, as the user gave it; the module is imported.
        options: of an environment factory.

    Raises:
        ValueError: the module cannot be imported, or has no such task or factory; the message has the reason.
    """
    found = import_object(name)
    if not isinstance(found, type) or not issubclass(found, Task):
        if not callable(found) or isinstance(found, EnvBase):
            raise ValueError(f"{name} is {shorten(found)}: expected a subclass of Task, or {SIGNATURE}.")
        factory: Any = found
        return env_task(name, factory, options)
    needed = [each for each in ("name", "data_options", "play_options") if getattr(found, each, None) is None]
    lacks = [*needed, *sorted(found.__abstractmethods__)]
    if lacks or options:
        problem = f"lacks {', '.join(lacks)}" if lacks else f"is no environment factory, it takes no --option {options}"
        raise ValueError(f"The task {name} {problem}: see the base class Task.")
    return found
