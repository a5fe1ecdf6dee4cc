"""Which replies count as yes-or-no answers (ILQL, arXiv 2206.11871: rewards "y/n" and "conservative")."""

from __future__ import annotations

import re
from typing import Literal, get_args

from torchrl_lang._checks import one_of

__all__ = ["PENALTIES", "Penalty", "is_yes_no"]

Penalty = Literal["none", "soft", "hard", "conservative"]
PENALTIES: tuple[Penalty, ...] = get_args(Penalty)

_WHOLE_WORD = re.compile(r"\b(?:yes|no)\b")
_CONSERVATIVE = (
    "not",
    "don't",
    "don\N{RIGHT SINGLE QUOTATION MARK}t",
    "can't",
    "can\N{RIGHT SINGLE QUOTATION MARK}t",
    "cannot",
    "fairly",
    "could",
    "think so",
    "okay",
    "maybe",
    "yes",
    "no",
    "looks",
    "appears",
    "tell",
    "mostly just",
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

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import is_yes_no
        >>> [is_yes_no("No, it is snow", penalty) for penalty in ("none", "soft", "hard", "conservative")]
        [False, True, False, True]
        >>> is_yes_no("snow", "soft"), is_yes_no("snow", "soft", substrings=True)
        (False, True)
    """
    one_of("penalty", penalty, PENALTIES)
    lowered = answer.lower()
    if penalty == "none":
        return False
    if penalty == "hard":
        return lowered in ("yes", "no")
    if penalty == "conservative":
        return any(words in lowered for words in _CONSERVATIVE)
    return bool(_WHOLE_WORD.search(lowered)) if not substrings else "yes" in lowered or "no" in lowered
