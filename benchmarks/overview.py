"""One table of all benchmarks, a group each: as text to read at once and as Markdown that stays with the records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import HEAD, align, cells, notes

Records = dict[str, dict[str, Any]]
"""What :func:`benchmarks.common.compared` makes, by the benchmark's name."""

LEGEND = (
    "Medians, in brackets the quartiles; a ratio is that of neighbouring runs. "
    "Beside a benchmark's name: the device, and what was another machine or version the last time."
)


def recorded(folder: Path, names: Iterable[str]) -> Records:
    """The records of a folder, in the order of ``names``."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def text(records: Records) -> str:
    """The table in columns, and below it the notes."""
    head, *lines = align([HEAD, *(cells(entry) for found in records.values() for entry in found["rows"])])
    rest, page, below = iter(lines), [head], [""]
    for name, found in records.items():
        page += ["", heading(name, found), *itertools.islice(rest, len(found["rows"]))]
        below += notes(found["rows"])
    return "\n".join([*page, *below, LEGEND])


def markdown(records: Records) -> str:
    """The same as one table of a Markdown page, with the pictures."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for name, found in records.items():
        group = (f"**{heading(name, found)}**", *[""] * (len(HEAD) - 1))
        lines += [group, *map(cells, found["rows"])]
    page = ["# Benchmarks", "", LEGEND, "", *("| " + " | ".join(map(_cell, line)) + " |" for line in lines), ""]
    for found in records.values():
        page += notes(found["rows"])
    pictures = [entry["figure"]["name"] for found in records.values() for entry in found["rows"] if "figure" in entry]
    page += [line for name in pictures for line in ("", f"![{name}]({name}.png)")]
    return "\n".join(page) + "\n"


def heading(name: str, found: dict[str, Any]) -> str:
    """The benchmark, its device, and whether its last time was another machine's."""
    machine = found["machine"]
    device = machine.get("device", f"cpu: {machine['processor']}")
    changed = ", ".join(f"{key} {was}" for key, was in found.get("changed", {}).items())
    return f"{name} ({device})" + (f"; last time: {changed}" if changed else "")


def _cell(content: str) -> str:
    return content.replace("|", "\\|")
