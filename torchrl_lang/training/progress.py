"""A progress bar that also works without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm

from torchrl_lang.training.metrics import Scalar, to_scalars


class Progress:
    """Shows the progress, speed and latest metrics of a run: a bar in a terminal, otherwise a line now and then.

    Metrics are copied from their device only when they are shown. A metric is shown until it is updated.

    Args:
        total: total number of units.
        label: text in front of the bar.
        start: number of units done before.
        unit: name of a unit.
        shown: names of the metrics to show; default all.
        every: seconds between lines, if the stream is not a terminal.
        stream: output stream; standard error by default.

    Examples:
        >>> import sys
        >>> from torchrl_lang.training.progress import Progress
        >>> with Progress(4, label="train", stream=sys.stdout, every=3600) as progress:
        ...     for step in range(1, 5):
        ...         progress.update(step, {"loss": 1 / step})
        train: 0/4 step
        train: 4/4 step, 100 %, ..., loss 0.25
    """

    def __init__(
        self,
        total: int,
        *,
        label: str = "",
        start: int = 0,
        unit: str = "step",
        shown: tuple[str, ...] | None = None,
        every: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.label, self.unit, self.shown = total, label, unit, shown
        self.stream = sys.stderr if stream is None else stream
        self._start = self._done = start
        self._figures: dict[str, Any] = {}
        self._bar: tqdm | None = None
        if self.stream.isatty():
            self._bar = tqdm(total=total, desc=label, initial=start, unit=unit, file=self.stream, dynamic_ncols=True)
        else:
            self._write(f"{label}: {start}/{total} {unit}")
        self._every = 0.5 if self._bar is not None else every
        self._began = self._last = time.monotonic()

    def update(self, done: int, figures: Mapping[str, Any] | None = None) -> None:
        """Set the number of units done and the latest metrics."""
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done
        named = (figures or {}).items()
        self._figures |= {key: value for key, value in named if self.shown is None or key in self.shown}
        if time.monotonic() - self._last >= self._every:
            self._show()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # on an error do not show metrics, which may be missing
            self._show()
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        self._last = now = time.monotonic()
        figures = [f"{name} {_short(value)}" for name, value in to_scalars(self._figures).items()]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(figures))
            return
        speed = (self._done - self._start) / max(now - self._began, 1e-9)
        share = 100 * self._done // max(self.total, 1)
        parts = [f"{self._done}/{self.total} {self.unit}", f"{share} %", f"{speed:.3g} {self.unit}/s"]
        if self._done < self.total and speed:
            parts.append(f"{tqdm.format_interval((self.total - self._done) / speed)} left")
        self._write(f"{self.label}: " + ", ".join([*parts, *figures]))

    def _write(self, line: str) -> None:
        self.stream.write(line.removeprefix(": ") + "\n")
        self.stream.flush()


def _short(value: Scalar) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
