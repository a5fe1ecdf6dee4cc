"""Records of runs: the options of a command, and whatever else defines its results, as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from torchrl_lang._files import Record, shorten
from torchrl_lang.recipes.algorithms import ALGORITHMS
from torchrl_lang.recipes.algorithms.training import holds_model
from torchrl_lang.recipes.options import dashed, plain
from torchrl_lang.training import Checkpointer


class OptionsRecord(Record):
    """Options of a command by name, ``notes`` of its data, and further fields."""

    model_config = ConfigDict(extra="allow")
    VERSION: ClassVar[int] = 2

    notes: dict[str, Any] = {}


def write_options(path: Path, options: Any, **more: Any) -> None:
    """Record options, and whatever else defines a run."""
    OptionsRecord(**plain(options, **more)).write(path)


def read_options(path: Path) -> OptionsRecord:
    """Read what :func:`write_options` wrote.

    Raises:
        FileNotFoundError: there is no run.
        FileError: the record is damaged or was edited, or another version of this library wrote it.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no run in {path.parent}: {path.name} is missing. Train one there first.")
    return OptionsRecord.read(path, remedy="put the file back as it was, or train in another folder")


def check_record(path: Path, options: Any, *, free: Collection[str] = (), **more: Any) -> None:
    """Raise unless a run is resumed with the options it was started with; ``free`` options may differ.

    Raises:
        ValueError: naming what differs.
    """
    before, now = read_options(path).model_dump(), plain(options, **more)
    changed = [key for key, value in now.items() if before.get(key) != value and key not in free]
    if changed:  # the values of options are short, the checksums of a dataset are not
        values = {key: f" was {shorten(before.get(key))} and is {now[key]}" for key in changed if key not in more}
        found = ", ".join(f"--{dashed(key)}{values[key]}" if key in values else key for key in changed)
        raise ValueError(f"{path.parent} holds a run with other options: {found}. Give another --out, or delete it.")


def keep_record(folder: Path, options: Any, *, free: Collection[str] = (), **more: Any) -> None:
    """Record the options of a comparison in its folder, or check that earlier results there go together with them.

    Arguments and errors are those of :func:`check_record`.
    """
    record = folder / "options.json"
    if record.exists():
        check_record(record, options, free=free, **more)
    write_options(record, options, **more)


# -- for the card of an agent -----------------------------------------------------------------------------------------


def described(run: Path) -> dict[str, str | None]:
    """The ``command`` that trained a run, its ``data`` and its ``base_model``, without paths of this machine.

    Before the command stand those of the runs that it started from, one a line.
    """
    options = read_options(run / "config.json").model_dump()
    learned: Mapping[str, Any] = options.get("learned_from") or {}
    digest = (
        f"of the file {options['dialogues']}"
        if "dialogues" in options
        else f"of its tokens {options['dataset']['tokens']}"
        if learned
        else ""
    )
    data = f"{learned['name']}: {learned['episodes']} episodes, SHA-256 {digest}." if learned else None
    commands = [command for each in _history(options) if (command := _command(each))]
    return {"command": "\n".join(commands) or None, "data": data, "base_model": _base_model(options)}


def _history(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The options of a run, after those of the runs that it started from, as far as their records are there."""
    start = options.get("start")
    record = None if start is None else Path(start) / "config.json"
    if record is None or not record.exists() or holds_model(record.parent):
        return [options]
    return [*_history(read_options(record).model_dump()), options]


def _command(options: Mapping[str, Any]) -> str | None:
    """The command line of a run, with the options that differ from the defaults."""
    kind = ALGORITHMS.get(options["algorithm"])
    if kind is None:
        return None
    words = ["python", "-m", "torchrl_lang", "train", options["algorithm"]]
    for field in fields(kind):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        value, name = options.get(field.name), dashed(field.name)
        if field.name not in options or value == (list(default) if isinstance(default, tuple) else default):
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        values = value.items() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        words += [f"--{name}", *(_word(each, is_path="Path" in str(field.type)) for each in values)]
    return shlex.join(words)


def _word(value: Any, *, is_path: bool) -> str:
    """A value of an option as the command line takes it; of a file or folder its name alone."""
    if isinstance(value, tuple):
        return f"{value[0]}={json.dumps(value[1])}"
    text = "none" if value is None else str(value)
    return Path(text).name if is_path or Path(text).is_absolute() or text.startswith(".") else text


def _base_model(options: Mapping[str, Any]) -> str | None:
    """The name on the hub of the model that a run began with, or the run that it started from."""
    name = _history(options)[0].get("pretrained")
    return None if name is None or Path(name).exists() else name  # a local model has no name


def results_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The last evaluation of a run in which a policy of this name played: a row for each player, this one first."""
    for path in sorted(run.glob("evaluation*.json"), key=_number, reverse=True):
        figures = json.loads(path.read_text(encoding="utf-8"))
        players = sorted(figures["players"], key=lambda player: player["name"] != name)
        if players[0]["name"] == name:
            return [dict(_cells(player), seed=figures["options"]["seed"]) for player in players]
    return []


def held_out(run: Path, name: str) -> list[dict[str, Any]]:
    """The loss that chose the checkpoint of a run without games, of its language model on held-out episodes."""
    found = Checkpointer(run / "checkpoints", best_by="held_out_log_prob").metrics("best").get("held_out_log_prob")
    return (
        []
        if found is None
        else [{"policy": name, "held-out loss of the language model, nats a token": round(-found, 4)}]
    )


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2] or 1)


def _cells(player: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a player's row, with standard errors."""
    yield "policy", player["name"]
    yield "games", player["games"]
    for name, value, error in (("return", "mean_return", "return_error"), ("won", "win_rate", "win_error")):
        yield name, f"{player[value]:.3f}" + ("" if player[error] is None else f" ± {player[error]:.3f}")
    yield "turns", round(player["mean_turns"], 2)
    yield from ((name, round(value, 3)) for name, value in player["metrics"].items())
