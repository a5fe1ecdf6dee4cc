"""Records of runs: the options of a command, and whatever else defines its results, as JSON."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict

from torchrl_lang._files import Record, shorten
from torchrl_lang.recipes.options import dashed, plain


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
