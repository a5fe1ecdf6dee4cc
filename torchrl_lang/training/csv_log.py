"""The metrics of a training run in one CSV file that stays valid if the run is killed."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_lang.storage import FileError, parse_rows, read_text, write_file
from torchrl_lang.storage.errors import shorten
from torchrl_lang.training.scalars import Scalar, to_scalars

__all__ = ["CSVLog"]

# TorchRL's CSVLogger writes one file per scalar and appends to existing ones, so a resumed run would write its steps a
# second time, and reading several metrics of a step would need a join.


_REMEDY = "correct it, or move it away to begin a new log"


class CSVLog:
    """One row per logged step and one column per metric; cells without a value are empty.

    Metrics that are logged for the last step again are added to its row; a new metric becomes a new column. :meth:`log`
    hands rows to the operating system before it returns. An incomplete last row, written during a crash, is dropped on
    opening, with a warning.

    Args:
        path: the file; its folder is created if missing. An existing file is continued.

    Raises:
        FileError: the file is damaged or is not such a log. It is not changed.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.training import CSVLog
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = CSVLog(f"{folder}/log.csv")
        ...     _ = log.log(10, {"loss": 0.5})
        ...     _ = log.log(10, {"return": -3.0})
        ...     _ = log.log(20, {"loss": 0.25})
        ...     log.rewind(10)  # the run resumes from its checkpoint of step 10
        ...     print(open(log.path).read())
        step,loss,return
        10,0.5,-3.0
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._names: list[str] = ["step"]
        self._rows: list[dict[str, Scalar]] = []
        if self.path.exists():
            self._read()

    @property
    def last_step(self) -> int | None:
        """The last step that was logged."""
        return int(self._rows[-1]["step"]) if self._rows else None

    def log(self, step: int, figures: Mapping[str, Any]) -> dict[str, Scalar]:
        """Log the metrics of a step.

        Args:
            step: not before the last logged step.
            figures: dict or tensordict of numbers and one-element tensors, which are copied from their device together.

        Returns:
            The metrics as plain numbers.
        """
        scalars = to_scalars(figures)
        last = self.last_step
        if last is not None and step < last:
            raise ValueError(f"Step {step} comes after step {last} in {self.path}: call rewind({step}) first.")
        if "step" in scalars:
            raise ValueError("'step' is the name of the first column: log this metric under another name.")
        new_names = [name for name in scalars if name not in self._names]
        self._names += new_names
        if step == last:
            self._rows[-1] |= scalars
        else:
            self._rows.append({"step": step, **scalars})
        if new_names or step == last:
            self._rewrite()
        else:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                file.write(self._line(self._rows[-1]))
        return scalars

    def rewind(self, step: int | None) -> None:
        """Delete what was logged after ``step``, or everything (``None``); call it when a run resumes."""
        self._rows = [] if step is None else [row for row in self._rows if row["step"] <= step]
        if step is None:
            self._names = ["step"]
        self._rewrite()

    def columns(self) -> dict[str, list[float]]:
        """All metrics by name, NaN for empty cells; :mod:`torchrl_lang.evaluation.plots` draws them."""
        return {name: [float(row.get(name, "nan")) for row in self._rows] for name in self._names}

    def close(self) -> None:
        """Does nothing, because no file stays open; for the interface of other logs."""

    def _line(self, row: Mapping[str, Scalar]) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow([row.get(name, "") for name in self._names])
        return buffer.getvalue()

    def _rewrite(self) -> None:
        header = self._line({name: name for name in self._names})  # type: ignore[misc]
        write_file(self.path, header + "".join(map(self._line, self._rows)))

    def _read(self) -> None:
        text = read_text(self.path, remedy=_REMEDY)
        whole = text[: text.rfind("\n") + 1]
        header, rows = parse_rows(whole or "step\n", self.path, remedy=_REMEDY)
        if header[:1] != ["step"] or (not whole and not "step".startswith(text[:4])):
            found = shorten(header if whole else text)
            raise FileError(self.path, f"is not a log: its first line is {found}, not 'step' and other names", _REMEDY)
        self._names = header
        for line, figures in rows:
            step, last = figures.get("step"), self.last_step
            if not isinstance(step, int) or (last is not None and step <= last):
                raise FileError(self.path, f"has the step {step} after the step {last} on line {line}", _REMEDY)
            self._rows.append(figures)
        if whole != text:
            warnings.warn(f"Dropped the last line of {self.path}, which is incomplete after a crash.", stacklevel=3)
            self._rewrite()
