"""Interrupt a command as Ctrl-C would, to see whether it continues with the same result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def interrupted_at(owner: Any, name: str, number: int) -> Iterator[None]:
    """What runs within is interrupted instead of its ``number``-th call of a function or method."""
    real, calls = getattr(owner, name), 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield
