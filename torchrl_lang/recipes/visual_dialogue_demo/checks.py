"""What the demo is to show: ILQL beats every imitation, and under a penalty asks few yes-or-no questions."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.recipes.compare import METHODS
from torchrl_lang.recipes.visual_dialogue_demo.comparison import Comparison, Row

__all__ = ["Check", "check"]

_ILQL, _BC = METHODS["ilql"].title, METHODS["bc"].title


@dataclass(frozen=True)
class Check:
    """ILQL beside the imitations under one reward."""

    penalty: str
    mean_return: float
    error: float
    imitation: str
    """The imitation that it beats by the fewest standard errors."""
    imitation_return: float
    imitation_error: float
    yes_no: float | None = None
    """Questions in a dialogue that were answered by yes or no, under a penalty and where BC is among the players."""
    yes_no_of_bc: float | None = None
    percentile_gain: float | None = None
    """Final percentile minus that of BC."""
    percentile_error: float | None = None

    @property
    def two_errors(self) -> float:
        """Two standard errors of the difference of the returns."""
        return 2 * math.hypot(self.error, self.imitation_error)

    @property
    def beats(self) -> bool:
        """Whether it beats every imitation by two standard errors."""
        return self.mean_return - self.imitation_return > self.two_errors

    @property
    def yes_no_ratio(self) -> float | None:
        """To BC's yes-or-no questions; None where BC asked none."""
        return self.yes_no / self.yes_no_of_bc if self.yes_no is not None and self.yes_no_of_bc else None

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "beats": self.beats, "two_errors": self.two_errors, "yes_no_ratio": self.yes_no_ratio}

    def __str__(self) -> str:
        verb = "beats" if self.beats else "does not beat"
        text = (
            f"{self.penalty}: ILQL's return of {self.mean_return:.2f} ± {self.error:.2f} {verb} every imitation by two "
            f"standard errors of the difference ({self.two_errors:.2f}). The nearest is {self.imitation}: "
            f"{self.imitation_return:.2f} ± {self.imitation_error:.2f}."
        )
        if self.yes_no is not None:
            ratio = "" if self.yes_no_ratio is None else f", a ratio of {self.yes_no_ratio:.2f}"
            text += (
                f"\n{self.penalty}: ILQL asks {self.yes_no:.3f} yes-or-no questions in a dialogue, BC "
                f"{self.yes_no_of_bc:.3f}{ratio}. Its final percentile minus BC's is {self.percentile_gain:+.3f} ± "
                f"{self.percentile_error:.3f}."
            )
        return text


def check(comparison: Comparison, task: VisualDialogueTask) -> Check | None:
    """The figures for one reward; None without ILQL or without standard errors."""
    ilql, penalty = comparison.row(_ILQL), comparison.penalty
    found = {row.name: row.summary(task, penalty) for row in comparison.rows if row.imitates}
    if ilql is None:
        return None
    own = ilql.summary(task, penalty)
    if own.return_error is None:
        return None
    checks = [
        Check(penalty, own.mean_return, own.return_error, name, one.mean_return, one.return_error or 0.0)
        for name, one in found.items()
    ]
    nearest = min(checks, key=lambda one: one.mean_return - one.imitation_return - one.two_errors)
    bc = comparison.row(_BC)
    return nearest if bc is None or penalty == "none" else _with_questions(nearest, ilql, bc, comparison)


def _with_questions(found: Check, ilql: Row, bc: Row, comparison: Comparison) -> Check:
    (own, error), (other, other_error) = ilql.final_percentile(), bc.final_percentile()
    return replace(
        found,
        yes_no=ilql.asked_yes_no(comparison.penalty),
        yes_no_of_bc=bc.asked_yes_no(comparison.penalty),
        percentile_gain=own - other,
        percentile_error=math.hypot(error, other_error),
    )
