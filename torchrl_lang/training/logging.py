"""The log of a training run: a CSV file that stays valid if the run is killed, and optionally TorchRL's loggers."""

from __future__ import annotations

import csv
import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, generate_exp_name, get_logger
from torchrl.record.loggers.mlflow import MLFlowLogger

from torchrl_lang import _ranks
from torchrl_lang._checks import check_options
from torchrl_lang._files import FileError, parse_rows, read_text, shorten, write_file
from torchrl_lang.training.metrics import Scalar, to_scalars

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
"""Names that :func:`make_log` accepts; all but ``csv`` are packages of the same name."""

_REMEDY = "correct it, or move it away to begin a new log"

# TorchRL's CSVLogger writes one file per scalar and appends to existing ones, so a resumed run would write its steps a
# second time, and reading several metrics of a step would need a join.


class RunLog:
    """The metrics of a run in a CSV file that stays valid if the run is killed, and in trackers.

    The file has one row per logged step and one column per metric; cells without a value are empty. Metrics that are
    logged for the last step again are added to its row; a new metric becomes a new column. An incomplete last row,
    written during a crash, is dropped on opening, with a warning.

    Log a step before its checkpoint is saved; otherwise a kill between the two loses the step. Trackers cannot be
    rewound: a run that resumes from a checkpoint sends some steps, with the same metrics, a second time.

    Args:
        path: the file; its folder is created if missing. An existing file is continued.
        trackers: TorchRL loggers that get the same metrics.

    Raises:
        FileError: the file is damaged or is not such a log. It is not changed.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.training import RunLog
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RunLog(f"{folder}/log.csv")
        ...     _ = log.log(10, {"loss": 0.5})
        ...     _ = log.log(10, {"return": -3.0})
        ...     _ = log.log(20, {"loss": 0.25})
        ...     log.rewind(10)  # the run resumes from its checkpoint of step 10
        ...     print(open(log.path).read())
        step,loss,return
        10,0.5,-3.0
    """

    def __init__(self, path: str | Path, trackers: Sequence[Logger] = ()) -> None:
        self.path = Path(path)
        self.trackers = list(trackers)
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
        """Log numbers and one-element tensors of a step, which is not before the last logged one.

        Returns:
            The metrics as plain numbers; tensors are copied from their device together.
        """
        scalars = to_scalars(figures)
        last = self.last_step
        if "step" in scalars or (last is not None and step < last):
            raise ValueError(f"Step {step} after step {last}: rewind({step}), and name no metric 'step'.")
        known = len(self._names)
        self._names = list(dict.fromkeys([*self._names, *scalars]))
        if step == last:
            self._rows[-1] |= scalars
        else:
            self._rows.append({"step": step, **scalars})
        if len(self._names) > known or step == last:
            self._rewrite()
        else:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                file.write(self._line(self._rows[-1]))
        for tracker in self.trackers:
            tracker.log_metrics(scalars, step=step)
        return scalars

    def rewind(self, step: int | None) -> None:
        """Delete what was logged after ``step``, or everything (``None``); call it when a run resumes."""
        self._rows = [] if step is None else [row for row in self._rows if row["step"] <= step]
        if step is None:
            self._names = ["step"]
        self._rewrite()

    def close(self) -> None:
        """Flush and close the trackers; the CSV file does not stay open."""
        for tracker in self.trackers:
            tracker.close()
            if isinstance(tracker, MLFlowLogger):
                import mlflow  # the logger does not end its run, but MLflow allows one at a time

                mlflow.end_run()

    def _line(self, row: Mapping[str, Scalar | str]) -> str:
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow([row.get(name, "") for name in self._names])
        return buffer.getvalue()

    def _rewrite(self) -> None:
        header = self._line({name: name for name in self._names})
        write_file(self.path, header + "".join(map(self._line, self._rows)))

    def _read(self) -> None:
        text = read_text(self.path, remedy=_REMEDY)
        whole = text[: text.rfind("\n") + 1]
        header, rows = parse_rows(whole or "step\n", self.path, remedy=_REMEDY)
        if header[:1] != ["step"] or (not whole and not "step".startswith(text[:4])):
            raise FileError(self.path, f"is not a log: it begins with {shorten(text)}, not with 'step'", _REMEDY)
        self._names = header
        for line, figures in rows:
            step, last = figures.get("step"), self.last_step
            if not isinstance(step, int) or (last is not None and step <= last):
                raise FileError(self.path, f"has the step {step} after the step {last} on line {line}", _REMEDY)
            self._rows.append(figures)
        if whole != text:
            warnings.warn(f"Dropped the last line of {self.path}, which is incomplete after a crash.", stacklevel=3)
            self._rewrite()


class _NoLog(RunLog):
    """The log of a process that writes none."""

    def __init__(self) -> None:
        self.trackers = []

    def log(self, step: int, figures: Mapping[str, Any]) -> dict[str, Scalar]:
        """Log nothing."""
        return {}

    def rewind(self, step: int | None) -> None:
        """There is nothing to delete."""


def make_log(folder: str | Path, *, trackers: Sequence[str] = ()) -> RunLog:
    """Open the log of a run: ``folder/log.csv``, and trackers by name.

    The name of the run in trackers is unique and stored in ``folder/run_name.txt``, so that a resumed run keeps its
    name (MLflow opens a second run in the experiment of that name).

    Args:
        folder: the run's folder.
        trackers: names among :data:`LOGGERS`; ``"csv"`` is always active.

    Raises:
        ValueError: a tracker's name is unknown.
        ImportError: the tracker's package is not installed.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.training.logging import make_log
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = make_log(folder)
        ...     log.log(1, {"loss": 0.5})
        ...     log.path.name
        {'loss': 0.5}
        'log.csv'
    """
    folder = Path(folder)
    if not _ranks.is_first():
        return _NoLog()
    for kind in trackers:
        check_options(logger=(kind, LOGGERS))
        if kind != "csv" and importlib.util.find_spec(kind) is None:
            raise ImportError(f"The logger {kind!r} needs the package of that name: pip install {kind}.")
    log = RunLog(folder / "log.csv")
    log.trackers = [_open(kind, folder / kind, _run_name(folder)) for kind in trackers if kind != "csv"]
    return log


def _run_name(folder: Path) -> str:
    kept, remedy = folder / "run_name.txt", "delete it to continue under a new name"
    if not kept.exists():
        write_file(kept, generate_exp_name(folder.name, "run") + "\n")
    name = read_text(kept, remedy=remedy).strip()
    if not name or name.startswith(".") or name != Path(name).name or not name.isprintable():
        raise FileError(kept, f"holds {shorten(name)}, which is not a valid folder name", remedy)
    return name


def _open(kind: str, folder: Path, run: str) -> Logger:
    if kind == "mlflow":
        # get_logger would store the run in plain files, which MLflow no longer supports.
        folder.mkdir(parents=True, exist_ok=True)
        database = (folder / "runs.db").absolute()
        return MLFlowLogger(run, f"sqlite:///{database}", artifact_location=folder.absolute().as_uri())
    options = {"wandb_kwargs": {"id": run}} if kind == "wandb" else {}  # the id with which W&B resumes the run
    return get_logger(kind, str(folder), run, **options)
