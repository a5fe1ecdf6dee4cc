"""When a visual dialogue ends and what its questions earn (ILQL, arXiv 2206.11871, section 6.3)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchrl_lang._checks import Finite, checked
from torchrl_lang.envs.visual_dialogue.files import ROUNDS

Penalty = Literal["none", "soft", "hard", "conservative"]

_WHOLE_WORD = re.compile(r"\b(?:yes|no)\b")
_CONSERVATIVE = (
    *("not", "don't", "don\N{RIGHT SINGLE QUOTATION MARK}t", "can't", "can\N{RIGHT SINGLE QUOTATION MARK}t", "cannot"),
    *("fairly", "could", "think so", "okay", "maybe", "yes", "no", "looks", "appears", "tell", "mostly just"),
)


def is_yes_no(answer: str, penalty: Penalty, *, substrings: bool = False) -> bool:
    """Whether a reply counts as a yes-or-no answer under one of the paper's definitions; case does not matter.

    ============  ======================================================================================================
    none          never
    soft          it contains the word "yes" or "no"
    hard          it is exactly "yes" or "no"; "no." is not
    conservative  it contains, also inside of words, not, don't, can't (with either apostrophe), cannot, fairly, could,
                  think so, okay, maybe, yes, no, looks, appears, tell or mostly just
    ============  ======================================================================================================

    Args:
        answer: the reply.
        penalty: the definition.
        substrings: "soft" also finds "no" inside of words such as "snow", as the ILQL paper's code does.
    """
    lowered = answer.lower()
    if penalty == "none":
        return False
    if penalty == "hard":
        return lowered in ("yes", "no")
    if penalty == "conservative":
        return any(words in lowered for words in _CONSERVATIVE)
    return bool(_WHOLE_WORD.search(lowered)) if not substrings else "yes" in lowered or "no" in lowered


STOP = "<stop>"
"""In mode "agent_stops" an action that contains this ends the dialogue."""

Mode = Literal["env_stops", "agent_stops", "10_stop"]

CutoffRule = Callable[[float, Sequence[float]], bool]
"""Whether a dialogue ends, given its initial value and the change of the value in each round so far, at least one."""


@checked
@dataclass(frozen=True)
class DialogueRewards:
    """The end of a dialogue and the rewards of its questions.

    ===========  ============================================  =========================================================
    mode         the dialogue ends                             reward of a question
    ===========  ============================================  =========================================================
    env_stops    when the cutoff rule holds, at the latest     -1, or 0 in the last round; plus ``penalty_value`` if its
                 after ten rounds                              reply is a yes-or-no answer
    agent_stops  when the agent writes ``<stop>``, at the      the value of its round; 0 for ``<stop>``
                 latest after ten rounds
    10_stop      after ten rounds                              the value of its round
    ===========  ============================================  =========================================================

    The cutoff rule is that the rounds have covered a fraction of the distance from the initial percentile to the goal:
    ``sum(progress) / (goal - initial) >= fraction``. Where the initial value has reached the goal, nothing is left to
    cover and the dialogue ends after its first round. (The ILQL paper's code divides by zero there.)

    An environment rewards ``scale * reward + shift``. In a dataset the ILQL paper's code, and so :attr:`of_dataset`,
    leaves out scale and shift in mode "env_stops" and for ``<stop>``.

    Args:
        mode: see above.
        penalty: which replies are yes-or-no answers, see :func:`is_yes_no`; the paper's rewards "standard", "y/n" and
            "conservative" are "none", "hard" and "conservative". Only in mode "env_stops".
        penalty_value: added to the reward of a question with such a reply.
        scale: factor of the rewards.
        shift: added to the scaled rewards.
        cutoff: another rule for mode "env_stops".
        soft_substrings: see ``substrings`` of :func:`is_yes_no`.
        goal: the percentile to reach.
        fraction: of the distance to the goal.

    Raises:
        ValueError: the mode or penalty is unknown, a number is not finite, or the option has no meaning in the mode.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import DialogueRewards
        >>> rewards = DialogueRewards(penalty="hard")
        >>> rewards.question(0.1, "no", last=False), rewards.question(0.1, "two", last=True)
        (-3.0, 0.0)
        >>> rewards.is_last(0.6, [0.1, 0.15])
        True
    """

    mode: Mode = "env_stops"
    penalty: Penalty = "none"
    penalty_value: Finite = -2.0
    scale: Finite = 1.0
    shift: Finite = 0.0
    cutoff: CutoffRule | None = None
    soft_substrings: bool = False
    goal: Finite = 1.0
    fraction: Finite = 0.5

    def __post_init__(self) -> None:
        if self.mode != "env_stops" and (self.penalty != "none" or self.cutoff is not None):
            given = f"penalty={self.penalty!r} and cutoff={self.cutoff}"
            raise ValueError(f"{given} are options of mode 'env_stops', but the mode is {self.mode!r}: leave them out.")
        if self.soft_substrings and self.penalty != "soft":
            raise ValueError(f"soft_substrings=True needs penalty='soft', got penalty={self.penalty!r}.")

    @property
    def of_dataset(self) -> DialogueRewards:
        """The rewards of the same questions in a dataset; see the class for the difference."""
        return replace(self, scale=1.0, shift=0.0) if self.mode == "env_stops" else self

    @property
    def ends_by_percentile(self) -> bool:
        """Whether a percentile that is reached ends a dialogue."""
        return self.mode == "env_stops" and self.cutoff is None

    def is_last(self, initial: float, progress: Sequence[float]) -> bool:
        """Whether a dialogue ends after the rounds so far.

        Args:
            initial: percentile or distance before the first round.
            progress: its change in each round so far.
        """
        if len(progress) >= ROUNDS:
            return True
        if self.mode != "env_stops" or not progress:
            return False
        if self.cutoff is not None:
            return self.cutoff(initial, progress)
        distance = self.goal - initial
        return distance <= 0 or sum(progress) / distance >= self.fraction

    def question(self, value: float, answer: str, *, last: bool) -> float:
        """The reward of a question.

        Args:
            value: the change of percentile or distance in its round.
            answer: the reply.
            last: whether its round is the last one.
        """
        if self.mode == "env_stops":
            asked_yes_no = is_yes_no(answer, self.penalty, substrings=self.soft_substrings)
            value = (0.0 if last else -1.0) + (self.penalty_value if asked_yes_no else 0.0)
        return value * self.scale + self.shift

    @property
    def stop(self) -> float:
        """The reward of ``<stop>`` in an environment."""
        return self.shift
