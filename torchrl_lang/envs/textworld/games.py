"""Game specifications: built by the engine's generators, cached by content, with locks between processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.envs.textworld.engine import EnginePool, EngineProcess, Failed, require_textworld
from torchrl_lang.envs.textworld.text import REFUSED, SILENT, Template

__all__ = ["TextWorldSpec", "build_games", "game_texts"]

Kind = Literal["simple", "coin_collector", "treasure_hunter", "cooking", "custom"]

_OPTIONS: dict[str, dict[str, Any]] = {
    "simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 5},
    "cooking": {
        "recipe": 1,
        "take": 0,
        "go": 1,
        "open": False,
        "cook": False,
        "cut": False,
        "drop": False,
        "recipe_seed": 0,
        "split": None,
    },
    "custom": {"world_size": 2, "nb_objects": 4, "quest_length": 3},
}
_BUILD_LIMIT = 300.0


class TextWorldSpec:
    """The specification of a game; the same specification builds the same game.

    ================  ==================================================================================================
    kind              options
    ================  ==================================================================================================
    simple            ``rewards`` "dense" | "balanced" | "sparse"; ``goal`` "detailed" | "brief" | "none"; ``test``
    coin_collector    ``level`` 1 to 300: up to 100 without distracting rooms, up to 200 with one, then with two a room
    treasure_hunter   ``level`` 1 to 30
    cooking           ``recipe``, ``take``, ``go`` (1, 6, 9, 12), ``open``, ``cook``, ``cut``, ``drop``,
                      ``recipe_seed``, ``split`` (None, "train", "valid", "test")
    custom            ``world_size``, ``nb_objects``, ``quest_length``
    ================  ==================================================================================================

    Args:
        kind: name of the engine's generator.
        seed: seed of the generator.
        **options: see above; the defaults are dense rewards, detailed goals and small games.

    Raises:
        ValueError: the kind is unknown.
        TypeError: the kind has no such option.

    Examples:
        >>> from torchrl_lang.envs.textworld import TextWorldSpec
        >>> TextWorldSpec("coin_collector", seed=3, level=10)
        TextWorldSpec('coin_collector', seed=3, level=10)
        >>> TextWorldSpec("simple") == TextWorldSpec("simple", seed=0, rewards="dense")
        True
    """

    def __init__(self, kind: Kind, seed: int = 0, **options: Any) -> None:
        if kind not in _OPTIONS:
            raise ValueError(f"The engine has no generator {kind!r}: choose one of {list(_OPTIONS)}.")
        unknown = sorted(set(options) - set(_OPTIONS[kind]))
        if unknown:
            raise TypeError(f"{kind!r} has no options {unknown}, it has {list(_OPTIONS[kind])}.")
        self.kind = kind
        self.seed = seed
        self.options: Mapping[str, Any] = {**_OPTIONS[kind], **options}

    @property
    def name(self) -> str:
        """Name of the game's file, a hash of everything that determines its content."""
        content = [self.kind, self.seed, sorted(self.options.items()), importlib.metadata.version("textworld")]
        return f"{self.kind}-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]}"

    def __repr__(self) -> str:
        options = {key: value for key, value in self.options.items() if value != _OPTIONS[self.kind][key]}
        named = "".join(f", {key}={value!r}" for key, value in options.items())
        return f"TextWorldSpec({self.kind!r}, seed={self.seed}{named})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextWorldSpec) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def build_games(
    specs: Sequence[TextWorldSpec], folder: str | os.PathLike[str] | None = None, *, workers: int | None = None
) -> list[Path]:
    """Build games that do not exist yet and return their files; this takes 2 to 5 seconds per game and core.

    Any number of processes may build into one folder at once. Each game is built atomically by one of them while the
    others wait for it.

    Args:
        specs: the games to build.
        folder: folder of games; default ``torchrl_lang/textworld`` in the user's cache (``$XDG_CACHE_HOME``).
        workers: number of games built in parallel; default the number of cores.

    Returns:
        A ``.z8`` file per specification, in order, with a ``.json`` beside it.

    Raises:
        ImportError: the engine is not installed.
        RuntimeError: the engine cannot build a game; the message names it.
    """
    require_textworld()
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_lang" / "textworld"
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{spec.name}.z8" for spec in specs]
    missing = {path: spec for path, spec in zip(paths, specs, strict=True) if not path.exists()}
    if missing:
        jobs = [
            {"do": "build", "path": str(path), "kind": spec.kind, "seed": spec.seed, "options": dict(spec.options)}
            for path, spec in missing.items()
        ]
        _build(jobs, [str(spec) for spec in missing.values()], min(len(jobs), workers or os.cpu_count() or 1))
    return paths


def _build(jobs: Sequence[Mapping[str, Any]], names: Sequence[str], workers: int) -> None:
    """Send job ``k`` to process ``k`` modulo their number; send all jobs before waiting for an answer."""
    processes = [EngineProcess() for _ in range(workers)]
    try:
        for number, process in enumerate(processes):
            process.ask(jobs[number::workers], singly=True)
        for number, name in enumerate(names):
            process = processes[number % workers]
            # Another process may build the same game and hold its lock; after that the job takes no time.
            if not process.connection.poll(_BUILD_LIMIT):
                raise TimeoutError(f"The engine has not built {name} within {_BUILD_LIMIT:.0f} s.")
            try:
                error = process.answers()[0].get("error")
            except (EOFError, OSError):
                error = "its process has died"
            if error:
                raise RuntimeError(f"The engine could not build {name}: {error}")
    finally:
        for process in processes:
            process.end()


def game_texts(
    games: Sequence[str | os.PathLike[str]], template: Template | None = None, *, workers: int = 1, steps: int = 100
) -> list[str]:
    """The texts and commands of games played by an expert, from which to make a tokenizer.

    Args:
        games: files of games, from :func:`build_games`.
        template: format of observations.
        workers: number of engine processes.
        steps: maximal number of commands per game.
    """
    template = Template() if template is None else template
    infos = sorted(template.infos | {"admissible_commands"})
    pool, texts = EnginePool(workers, infos, expert=True), [REFUSED, SILENT]
    try:
        answers = pool.begin({row: os.fspath(path) for row, path in enumerate(games)})
        for step in range(steps + 1):
            live = {}
            for row, state in answers.items():
                if isinstance(state, Failed):
                    raise RuntimeError(f"{games[row]}: {state}")
                texts.append(template.write("reply" if step else "opening", state))
                if "outcome" in template.fields:  # an expert's commands do not fail
                    texts.append(template.write("reply", {**state, "acted": False}))
                texts.append(", ".join(state["admissible_commands"]))
                if not state["done"]:
                    live[row] = state["expert"]
            if not live:
                break
            answers = pool.step(live)
    finally:
        pool.close()
    return [text.lower() for text in texts] if template.lower else texts
