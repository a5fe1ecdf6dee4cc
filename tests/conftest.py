"""What all tests need of the process that they run in."""

from __future__ import annotations

import signal

import pytest
import tyro  # noqa: F401  it fails where a doctest before has left a tuple with a list as `builtins._`

from . import garbage
from .processes import use_a_server

# A shell that starts a job in the background makes it ignore Ctrl-C, and the commands that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

use_a_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All tests are imported."""
    garbage.collect_what_comes_later()
