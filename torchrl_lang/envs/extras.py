"""Packages that only some environments need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(what: str, extra: str, other: str = "") -> Iterator[None]:
    """Names the extra to install where an import in the block fails.

    Examples:
        >>> from torchrl_lang.envs.extras import needs_extra
        >>> with needs_extra("OpenEnvGame", "openenv"):
        ...     raise ImportError("No module named 'websockets'")
        Traceback (most recent call last):
            ...
        ImportError: OpenEnvGame needs an extra: pip install 'torchrl-lang[openenv]'.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs an extra: pip install 'torchrl-lang[{extra}]'{other}.") from error
