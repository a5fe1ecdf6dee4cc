"""Damage to CSV files: rows and cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.campaigns.mutators.base import Mutator, with_suffix

Cells = list[list[str]]


def table(change: Callable[[Cells, Random], None]) -> Callable[[Path, Random], str]:
    """A mutator of a table, its header included."""

    def apply(path: Path, random: Random) -> str:
        cells = [line.split(",") for line in path.read_text().splitlines()]
        change(cells, random)
        path.write_text("".join(",".join(row) + "\n" for row in cells))
        return change.__name__

    return apply


def set_cell(*values: str) -> Callable[[Cells, Random], None]:
    def cell(cells: Cells, random: Random) -> None:
        row = random.choice(cells[1:])
        row[random.randrange(len(row))] = random.choice(values)

    return cell


def drop_cell(cells: Cells, random: Random) -> None:
    random.choice(cells).pop()


def add_cell(cells: Cells, random: Random) -> None:
    random.choice(cells).append("1")


def drop_row(cells: Cells, random: Random) -> None:
    del cells[random.randrange(len(cells))]


def repeat_row(cells: Cells, random: Random) -> None:
    cells.insert(random.randrange(len(cells)), random.choice(cells)[:])


def swap_rows(cells: Cells, random: Random) -> None:
    i, j = random.sample(range(len(cells)), 2)
    cells[i], cells[j] = cells[j], cells[i]


def rename_column(cells: Cells, random: Random) -> None:
    cells[0][random.randrange(len(cells[0]))] = random.choice(["", "step", "other"])


CHANGES: dict[str, Callable[[Cells, Random], None]] = {
    "cell_of_text": set_cell("nonsense", "1e", '"', "0x10", "\u0661"),
    "cell_not_finite": set_cell("nan", "inf"),
    "cell_huge": set_cell("9" * 5000, "1e999", "-1"),
    **{change.__name__: change for change in (drop_cell, add_cell, drop_row, repeat_row, swap_rows, rename_column)},
}

TABLES = [Mutator(f"table_{name}", with_suffix(".csv"), table(change)) for name, change in CHANGES.items()]
