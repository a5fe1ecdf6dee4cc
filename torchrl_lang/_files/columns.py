"""Read CSV files of numbers whose first line names the columns."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from torchrl_lang._files.errors import FileError, shorten

__all__ = ["parse_rows"]


Row = dict[str, int | float]


def parse_rows(text: str, path: str | Path, *, remedy: str) -> tuple[list[str], list[tuple[int, Row]]]:
    r"""Parse a CSV text into the column names and pairs of line number and row; empty cells are left out of a row.

    Args:
        text: the content of the file.
        path: the file, for the error message.
        remedy: what the user can do if the text cannot be parsed, for the error message.

    Raises:
        FileError: a column name is missing or repeated, a row has the wrong number of cells, or a cell is not a number.

    Examples:
        >>> from torchrl_lang._files import parse_rows
        >>> parse_rows("step,loss,return\n1,0.5,\n2,0.25,-3.0\n", "log.csv", remedy="delete it")
        (['step', 'loss', 'return'], [(2, {'step': 1, 'loss': 0.5}), (3, {'step': 2, 'loss': 0.25, 'return': -3.0})])
    """
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise FileError(path, f"is not a CSV file (line {reader.line_num}: {error})", remedy) from error
    names = lines[0][1] if lines else []
    if len(set(names)) < len(names) or not all(name and name.isprintable() for name in names):
        raise FileError(path, f"has the columns {shorten(names)}, one of which has no name or is repeated", remedy)
    rows = []
    for line, cells in lines[1:]:
        try:
            row = {name: _number(cell) for name, cell in zip(names, cells, strict=True) if cell}
        except ValueError as error:
            found = f"holds {shorten(cells)} on line {line}, expected numbers for {shorten(names)}"
            raise FileError(path, found, remedy) from error
        rows.append((line, row))
    return names, rows


def _number(cell: str) -> int | float:
    number = float(cell)
    return int(cell) if cell.lstrip("-").isdecimal() and abs(number) < 2**63 else number
