"""Interrupt a training run as Ctrl-C would, to see whether it continues with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchrl_lang.recipes.offline_evaluation import GamesEvaluation


@contextmanager
def interrupted_at_evaluation(number: int) -> Iterator[None]:
    """Runs within are interrupted before their ``number``-th evaluation in games."""
    real, calls = GamesEvaluation.figures, 0

    def figures(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GamesEvaluation, "figures", figures)
        yield
