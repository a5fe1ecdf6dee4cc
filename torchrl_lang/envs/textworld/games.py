"""Game specifications: built by the engine's generators, cached by content, with locks between processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from torchrl_lang._checks import check_options
from torchrl_lang._files import FileError, read_json
from torchrl_lang.envs.textworld.engine import REMEDY, EnginePool, EngineProcess, Failed, require_textworld
from torchrl_lang.envs.textworld.text import REFUSED, SILENT, WORD, Template

Apart = Literal["solutions", "games"]
Kind = Literal["simple", "coin_collector", "treasure_hunter", "cooking", "custom"]

_OPTIONS: dict[str, dict[str, Any]] = {
    "simple": {"rewards": "dense", "goal": "detailed", "test": False},
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 5},
    "cooking": {"recipe": 1, "take": 0, "go": 1, "recipe_seed": 0, "split": None}
    | dict.fromkeys(("open", "cook", "cut", "drop"), False),
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
        ValueError: the kind is unknown, or has no such option.

    Examples:
        >>> from torchrl_lang.envs.textworld import TextWorldSpec
        >>> TextWorldSpec("coin_collector", seed=3, level=10)
        TextWorldSpec('coin_collector', seed=3, level=10)
        >>> TextWorldSpec("simple") == TextWorldSpec("simple", seed=0, rewards="dense")
        True
    """

    def __init__(self, kind: Kind, seed: int = 0, **options: Any) -> None:
        check_options(kind=(kind, _OPTIONS))
        if unknown := sorted(set(options) - set(_OPTIONS[kind])):
            raise ValueError(f"{kind!r} has no options {unknown}, it has {list(_OPTIONS[kind])}.")
        self.kind, self.seed = kind, seed
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
    specs: Sequence[TextWorldSpec], folder: str | Path | None = None, *, workers: int | None = None
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
        _build(missing, min(len(missing), workers or os.cpu_count() or 1))
    return paths


def _build(missing: Mapping[Path, TextWorldSpec], workers: int) -> None:
    """Build game ``k`` in process ``k`` modulo their number; send all jobs before waiting for an answer."""
    jobs = [{"path": str(path), **vars(spec)} for path, spec in missing.items()]
    processes = [EngineProcess() for _ in range(workers)]
    try:
        for number, process in enumerate(processes):
            process.ask(jobs[number::workers], singly=True)
        for number, name in enumerate(missing.values()):
            try:
                # Another process may build the same game and hold its lock; after that the job takes no time.
                error = processes[number % workers].answers(_BUILD_LIMIT)[0].get("error")
            except (EOFError, OSError):
                error = f"its process has died, or took longer than {_BUILD_LIMIT:.0f} s"
            if error:
                raise RuntimeError(f"The engine could not build {name}: {error}")
    finally:
        for process in processes:
            process.end()


def game_texts(
    games: Sequence[str | Path], template: Template | None = None, *, workers: int = 1, steps: int = 100
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
        answers: Mapping[int, Any] = pool.begin({row: os.fspath(path) for row, path in enumerate(games)})
        for step in range(steps + 1):
            live = {}
            for row, state in answers.items():
                assert not isinstance(state, Failed), (games[row], state)
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
    return [template.cased(text) for text in texts]


def theme_words() -> list[str]:
    """The words, in lower case, of the names that the engine's generators give to rooms and things.

    They are read from the grammar of the engine, without the words of its sentences and commands. So the names of all
    games can be symbols of a tokenizer, those of games that were not built yet as well. A mark such as "type y" is one.
    """
    folder = importlib.metadata.distribution("textworld").locate_file("textworld/generator/data/text_grammars")
    names, room, instruction = (
        (Path(str(folder)) / f"house_{name}.twg").read_text(encoding="utf-8").lower()
        for name in ("obj", "room", "instruction")
    )
    alternatives = dict(re.findall(r"(?m)^([^#:\n][^:\n]*):(.*)$", names))

    def compounds(symbol: re.Match[str]) -> str:
        """Of "#berry#berry" the words strawberry, blueberry, ...; other symbols have lines of their own."""
        beginnings = alternatives.get(symbol[1], "").split(";") if symbol[2] else []
        return " ".join(beginning + symbol[2] for beginning in beginnings)

    sentences = [
        name for name, text in alternatives.items() if "(name" in text or "_desc" in name or name == "ordinary_adj"
    ]
    listed = [text for name, text in alternatives.items() if name not in sentences]
    words = WORD.findall(re.sub(r"#([^#]*)#(\w*)", compounds, " ; ".join(listed)))
    words += [f"type {mark}" for kind in ("number", "letter") for mark in alternatives[kind].split(";")]
    # The parser takes single letters as commands, such as n for north.
    return sorted({word for word in words if len(word) > 1} - {*WORD.findall(room + instruction)})


_HEADER = 64
"""Bytes of the header of a Z-machine file (Z-Machine Standard 1.1, section 11)."""


def game_files(games: Sequence[str | Path]) -> tuple[str, ...]:
    """The absolute paths of games, each checked: the engine hangs or crashes on damaged files."""
    if isinstance(games, str | os.PathLike) or not games:
        raise ValueError(f"games must be a sequence of files, at least one, got {games!r}: see build_games(specs).")
    for path in map(Path, dict.fromkeys(games)):
        content = path.read_bytes() if path.is_file() else b""
        length = 8 * int.from_bytes(content[0x1A:0x1C], "big")
        found = int(np.frombuffer(content[_HEADER:length], np.uint8).sum(dtype=np.int64)) % 2**16
        is_game = len(content) >= max(_HEADER, length) and content[0] == 8  # of the Z-machine, version 8
        if not is_game or found != int.from_bytes(content[0x1C:0x1E], "big"):
            raise FileError(path, "is no game of the Z-machine, version 8, or is missing or damaged", REMEDY)
        read_json(path.with_suffix(".json"), remedy=f"delete {path} and build the game again with build_games(specs)")
    return tuple(map(os.path.abspath, games))


class GameSets(NamedTuple):
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
        found = f"{len(games)} games, {len(groups)} when {apart} are apart"
        raise ValueError(f"{found}, leave none to learn from besides valid={valid} and test={test}: build more.")
    return GameSets(**{name: tuple(sorted(chosen)) for name, chosen in sets.items()})


def _whole(game: Path) -> str:
    """The game without its random seeds."""
    content = {key: value for key, value in _content(game).items() if key != "metadata"}
    return json.dumps([content, solution(game)], sort_keys=True)


def _content(game: Path) -> dict[str, Any]:
    return read_json(game.with_suffix(".json"), remedy=f"delete {game}, it is then built again")
