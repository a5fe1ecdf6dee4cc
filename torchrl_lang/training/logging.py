"""The log of a training run: a CSV file, and optionally TorchRL's other loggers by name."""

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
"""Names that :func:`make_log` accepts; all but ``csv`` are packages of the same name."""


class RunLog:
    """A CSV log, and trackers that get the same metrics.

    Trackers cannot be rewound: a run that resumes from a checkpoint logs some steps a second time. The resumed run
    computes the same metrics, so the curves do not change; the CSV file has each step once.

    Log a step before its checkpoint is saved; otherwise a kill between the two loses the step.

    Args:
        csv: the main log.
        trackers: TorchRL loggers.
    """

    def __init__(self, csv: CSVLog, trackers: Sequence[Logger] = ()) -> None:
        self.csv = csv
        self.trackers = list(trackers)

    def log(self, step: int, figures: Mapping[str, Any]) -> dict[str, Scalar]:
        """Log the metrics of a step, see :meth:`CSVLog.log`. Returns them as plain numbers."""
        scalars = self.csv.log(step, figures)
        for tracker in self.trackers:
            tracker.log_metrics(scalars, step=step)
        return scalars

    def rewind(self, step: int | None) -> None:
        """Delete what was logged after ``step``, or everything (``None``); pass the result of ``restore``."""
        self.csv.rewind(step)

    def close(self) -> None:
        """Flush and close the trackers."""
        for tracker in self.trackers:
            tracker.close()
            if isinstance(tracker, MLFlowLogger):
                import mlflow  # the logger does not end its run, but MLflow allows one at a time

                mlflow.end_run()


def make_log(folder: str | Path, *, trackers: str | Sequence[str] = (), name: str | None = None) -> RunLog:
    """Open the log of a run: ``folder/log.csv``, and trackers by name.

    Args:
        folder: the run's folder.
        trackers: names among :data:`LOGGERS`; ``"csv"`` is always active.
        name: name of the run in trackers. The default is unique and stored in ``folder/run_name.txt``, so that a
            resumed run keeps its name (MLflow opens a second run in the experiment of that name).

    Raises:
        ValueError: a tracker's name is unknown.
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
