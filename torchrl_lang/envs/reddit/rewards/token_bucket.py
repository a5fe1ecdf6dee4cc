"""A limit of the number of requests in a time."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from torchrl_lang._checks import at_least_one, positive

__all__ = ["SYSTEM_CLOCK", "Clock", "TokenBucket"]


class Clock(Protocol):
    """Measures and waits; the module ``time`` is one."""

    def monotonic(self) -> float:
        """Seconds since any fixed moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class _SystemClock:
    """The module ``time`` as an object that can be copied and pickled."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


SYSTEM_CLOCK = _SystemClock()


class TokenBucket:
    """Lets ``burst`` requests pass at once, and ``rate`` per second in the long run; threads may share it.

    Copies have tokens of their own.

    Args:
        rate: tokens that are added per second.
        burst: tokens that the bucket holds; it begins full.
        clock: what measures and waits.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards.token_bucket import TokenBucket
        >>> class Clock:
        ...     now = 0.0
        ...     def monotonic(self):
        ...         return self.now
        ...     def sleep(self, seconds):
        ...         print("waits", seconds)
        ...         self.now += seconds
        >>> bucket = TokenBucket(rate=2.0, burst=2, clock=Clock())
        >>> for _ in range(4):
        ...     bucket.take()
        waits 0.5
        waits 0.5
    """

    def __init__(self, rate: float, *, burst: int = 1, clock: Clock = SYSTEM_CLOCK) -> None:
        positive("rate", rate)
        at_least_one("burst", burst)
        self.rate, self.burst, self._clock = rate, burst, clock
        self._tokens, self._counted = float(burst), clock.monotonic()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Take a token; waits until there is one."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self.burst, self._tokens + (now - self._counted) * self.rate) - 1
            self._counted = now
            wait = -self._tokens / self.rate  # below 0 tokens are promised to calls that wait
        if wait > 0:
            self._clock.sleep(wait)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        self._counted = self._clock.monotonic()  # another machine counts from another moment
