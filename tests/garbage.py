"""Imports make half a million objects that stay: the garbage collector waits meanwhile, then leaves them alone."""

from __future__ import annotations

import gc

gc.disable()


def collect_what_comes_later() -> None:
    """Let the collector work again, on what is made from here on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
