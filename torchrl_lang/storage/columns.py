"""Read CSV files of numbers whose first line names the columns."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from torchrl_lang.storage.errors import FileError, shorten
from torchrl_lang.storage.readers import read_text

__all__ = ["parse_rows", "read_rows"]


Row = dict[str, int | float]


def read_rows(path: str | Path, *, remedy: str) -> tuple[list[str], list[Row]]:
    r"""Read the column names and the rows; empty cells are left out of a row.

    An incomplete last line, written during a crash, is ignored.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.

    Raises:
        FileError: the file is missing, is not text, or is not a table of numbers.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.storage import read_rows
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "log.csv")
        ...     _ = path.write_text("step,loss,return\n1,0.5,\n2,0.25,-3.0\n3,0.")
        ...     read_rows(path, remedy="delete it")
        (['step', 'loss', 'return'], [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.25, 'return': -3.0}])
    """
    text = read_text(path, remedy=remedy)
    names, rows = parse_rows(text[: text.rfind("\n") + 1], path, remedy=remedy)
    return names, [row for _, row in rows]


def parse_rows(text: str, path: str | Path, *, remedy: str) -> tuple[list[str], list[tuple[int, Row]]]:
    """Parse the text that :func:`read_rows` reads into the column names and pairs of line number and row.

    Raises:
        FileError: a column name is missing or repeated, a row has the wrong number of cells, or a cell is not a number.
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
