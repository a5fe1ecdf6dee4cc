"""Where a training run's figures go: always a CSV file, and TorchRL's other loggers by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger, generate_exp_name, get_logger
from torchrl.record.loggers.mlflow import MLFlowLogger

from torchrl_lang.storage import FileError, read_text, write_file
from torchrl_lang.storage.errors import shorten
from torchrl_lang.training.csv_log import CSVLog
from torchrl_lang.training.scalars import Scalar

__all__ = ["LOGGERS", "RunLog", "make_log"]

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "trackio")
"""Names that :func:`make_log` knows; all but ``csv`` are packages of the same name."""


class RunLog:
    """A CSV log, and trackers that are told the same.

    A tracker cannot forget: when a run goes on from a checkpoint, it is told some steps a second time. The resumed run
    gives the same figures, so curves stay as they are; the CSV file has each step once.

    Log a step before its checkpoint is saved, or a kill between the two leaves the step out.

    Args:
        csv: the log that counts.
        trackers: TorchRL loggers.
    """

    def __init__(self, csv: CSVLog, trackers: Sequence[Logger] = ()) -> None:
        self.csv = csv
        self.trackers = list(trackers)

    def log(self, step: int, figures: Mapping[str, Any]) -> dict[str, Scalar]:
        """Log figures of a step, see :meth:`CSVLog.log`. Returns them as plain numbers."""
        scalars = self.csv.log(step, figures)
        for tracker in self.trackers:
            tracker.log_metrics(scalars, step=step)
        return scalars

    def rewind(self, step: int | None) -> None:
        """Forget what was logged after ``step``, or everything (``None``): call it with what ``restore`` returned."""
        self.csv.rewind(step)

    def close(self) -> None:
        """Hand the trackers what they still hold back."""
        for tracker in self.trackers:
            tracker.close()
            if isinstance(tracker, MLFlowLogger):
                import mlflow  # the logger leaves its run open, and MLflow has one at a time

                mlflow.end_run()


def make_log(folder: str | Path, *, trackers: str | Sequence[str] = (), name: str | None = None) -> RunLog:
    """Open the log of a run: ``folder/log.csv``, and trackers by name.

    Args:
        folder: the run's folder.
        trackers: among :data:`LOGGERS`; ``"csv"`` is always there and need not be named.
        name: of the run, for trackers; by default one that no other run has, kept in ``folder/run_name.txt`` so that a
            run that is resumed goes on under its name (MLflow opens a second run in the experiment of that name).

    Raises:
        ValueError: there is no tracker of that name.
        ImportError: the tracker's package is not installed.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.training import make_log
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = make_log(folder)
        ...     log.log(1, {"loss": 0.5})
        ...     log.csv.path.name
        {'loss': 0.5}
        'log.csv'
    """
    folder = Path(folder)
    names = [trackers] if isinstance(trackers, str) else list(trackers)
    for kind in names:
        if kind not in LOGGERS:
            raise ValueError(f"There is no logger {kind!r}: choose among {', '.join(LOGGERS)}.")
        if kind != "csv" and importlib.util.find_spec(kind) is None:
            raise ImportError(f"The logger {kind!r} needs the package of that name: pip install {kind}.")
    csv = CSVLog(folder / "log.csv")
    kinds = [kind for kind in names if kind != "csv"]
    if not kinds:
        return RunLog(csv)
    run = name or _run_name(folder)
    return RunLog(csv, [_open(kind, folder / kind, run) for kind in kinds])


def _run_name(folder: Path) -> str:
    kept, remedy = folder / "run_name.txt", "delete it to go on under a new name"
    if not kept.exists():
        write_file(kept, generate_exp_name(folder.name, "run") + "\n")
    name = read_text(kept, remedy=remedy).strip()
    if not name or name.startswith(".") or name != Path(name).name or not name.isprintable():
        raise FileError(kept, f"holds {shorten(name)}, which is no name of a folder", remedy)
    return name


def _open(kind: str, folder: Path, run: str) -> Logger:
    if kind == "mlflow":
        # get_logger would keep the run in plain files, which MLflow no longer reads or writes.
        folder.mkdir(parents=True, exist_ok=True)
        database = (folder / "runs.db").absolute()
        return MLFlowLogger(run, f"sqlite:///{database}", artifact_location=folder.absolute().as_uri())
    options = {"wandb_kwargs": {"id": run}} if kind == "wandb" else {}  # the id by which W&B finds the run again
    return get_logger(kind, str(folder), run, **options)
