"""When the policy's log-probability may be missing: on purpose, or where nobody has a policy."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Literal

from torchrl.envs.utils import check_env_specs

from torchrl_lang.envs import check_language_env

__all__ = ["MissingLogProb", "may_be_missing"]

MissingLogProb = Literal["error", "zero"]

# They play at random, without log-probabilities, to look at shapes and nothing else.
_CHECKS = frozenset({check_env_specs.__code__, check_language_env.__code__})


def may_be_missing(missing: MissingLogProb) -> bool:
    """Whether an action without log-probability is no mistake: asked for, or within a check of the environment."""
    return missing == "zero" or _within_check()


def _within_check() -> bool:
    # Looked at only where a log-probability is missing, so it costs no ordinary step anything.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CHECKS:
            return True
        frame = frame.f_back
    return False
