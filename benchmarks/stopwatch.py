"""Where the time of a job goes: functions are wrapped inside a `with` block, and the time in each is added up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


class Stopwatch:
    """Seconds in named parts of a program; of parts inside each other, the inner one's time is its own alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def watching(self, parts: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
        """While the block lasts, time the functions ``(owner, name)`` of each part."""
        with ExitStack() as stack:
            for part, functions in parts.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def _turn(self) -> None:
        """Count the time until now for the part that is open."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now
