"""Stop a training run between two steps, with a checkpoint, on Ctrl-C (SIGINT) or SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports torch, and `--help` must not wait for torch
    from torchrl_lang.training import Checkpointer


class Stopped(KeyboardInterrupt):
    """A signal has stopped a command; the message, if there is one, names the checkpoint to continue from."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def stopping(
    checkpoints: Checkpointer, unit: str, *, check: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Within, SIGINT and SIGTERM only ask to stop, for the loop to save a checkpoint and leave; a second one acts.

    Signals that are ignored stay so, and in other threads than the main one nothing changes.

    Args:
        checkpoints: of the run; the latest one is named when it has stopped.
        unit: of the checkpoints' steps.
        check: called on each signal; what it raises ends the loop at once.

    Yields:
        A function that returns whether to stop, which all processes of a run call.

    Raises:
        Stopped: on leaving, if a signal has asked for it.

    Examples:
        >>> import signal, tempfile
        >>> from torchrl_lang.recipes.stopping import Stopped, stopping
        >>> from torchrl_lang.training import Checkpointer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpointer(folder)
        ...     try:
        ...         with stopping(checkpoints, "step") as asked:
        ...             for step in range(1, 100):
        ...                 if step == 3:
        ...                     signal.raise_signal(signal.SIGINT)
        ...                 if asked():
        ...                     _ = checkpoints.save(step)
        ...                     break
        ...     except Stopped as stop:
        ...         print(str(stop).split(",")[0])
        stopped after step 3
    """
    from torchrl_lang import _ranks  # here, because it imports torch

    asked: list[int] = []
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        check()
        if number in asked:
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        asked.append(number)
        with suppress(OSError):  # not print(), which the signal may have interrupted
            if _ranks.is_first():
                os.write(2, f"\ntorchrl_lang: stopping after this {unit}; once more stops at once\n".encode())

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, ask)

    def asked_anywhere() -> bool:
        if _ranks.any_of(bool(asked)) and not asked:  # another process was
            asked.append(signal.SIGTERM)
        return bool(asked)

    try:
        yield asked_anywhere
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    if asked:
        step, path = max(checkpoints.steps(), default=0), checkpoints.path()
        raise Stopped(asked[0], f"stopped after {unit} {step}, checkpoint {path}; the same command continues from it")
