"""Templates of steps: which words describe a step of a learning history, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.quantizers import FiniteQuantizer, Quantizer

__all__ = ["Numbers", "Slot", "StepTemplate", "TokenKind"]

Numbers = Quantizer | Sequence[Quantizer]
"""How an entry of a step is written: one quantizer for an entry of one number ``[L]``, or ``D`` for one ``[L, D]``."""

_ITEM = re.compile(r"\[([^\]]*)\]|(\S+)")
_FIELDS = ("{observation}", "{action}", "{reward}", "{reward}{end}", "{end}")


class TokenKind(IntEnum):
    """What a token of a row describes; the entry ``token_kind`` of rows of the language format holds it."""

    FORMAT = 0
    """A word of the template, a control token, or padding; in a text task also the prompt."""
    OBSERVATION = 1
    ACTION = 2
    """In a text task the completion."""
    REWARD = 3
    END = 4


class Slot(NamedTuple):
    """The place of one word in a step."""

    kind: TokenKind
    quantizer: Quantizer | None
    """Of a number; None for a word that the template gives."""
    component: int | None = None
    """Which number of an entry with several."""
    words: tuple[str, ...] = ("",)
    """The template's words: one, those of the ends (running, terminated, truncated), or their suffixes."""
    optional: bool = False
    """The slot is left out where the reward is zero."""


@dataclass(frozen=True)
class StepTemplate:
    """How steps of a learning history are written as words, without loss beyond that of the quantizers.

    A pattern is a sequence of words and of the fields ``{observation}``, ``{action}``, ``{reward}`` and ``{end}``, in
    this order. ``{end}`` is a word where an episode ends, one of two, because a truncated episode is not terminated;
    elsewhere it is nothing. ``{reward}{end}`` is one word for both, so that all steps have the same number of words.
    What stands in brackets, such as ``[got {reward}]``, is left out of steps whose reward is zero, not of -0.0.

    ``episode`` and ``episode_step`` are not written: reading counts them from the ends. Neither is
    ``action_log_prob``.

    Args:
        pattern: the pattern.
        observation: quantizers of the observation.
        action: quantizers of the action.
        reward: quantizer of the reward.
        terminated: the word, or the end of a word, of a step that terminates its episode.
        truncated: the same of a step that truncates it.

    Raises:
        ValueError: fields of the pattern are missing, repeated or in another order, or a text of the template could be
            read in two ways.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate
        >>> cells, moves = Levels(range(9)), Levels(range(2), ["left", "right"])
        >>> StepTemplate.spelled([cells, cells], moves, Levels([0, 1])).pattern
        'at {observation} go {action} got {reward} {end}'
        >>> StepTemplate("{action} {observation}", cells, moves, Levels([0, 1]))
        Traceback (most recent call last):
            ...
        ValueError: A pattern has the fields {observation}, {action}, {reward} and {end} once each, in this order, got
        '{action} {observation}'.
    """

    pattern: str
    observation: Numbers
    action: Numbers
    reward: Quantizer
    terminated: str = "finished"
    truncated: str = "stopped"
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def compact(cls, observation: Numbers, action: Numbers, reward: Quantizer) -> StepTemplate:
        """Numbers only: ``3 4 north 0``, with ``0!`` for a reward that terminates, ``0/`` for one that truncates."""
        return cls("{observation} {action} {reward}{end}", observation, action, reward, "!", "/")

    @classmethod
    def spelled(cls, observation: Numbers, action: Numbers, reward: Quantizer) -> StepTemplate:
        """Numbers with their meaning: ``at 3 4 go north got 0``, and ``finished`` or ``stopped`` at an end."""
        return cls("at {observation} go {action} got {reward} {end}", observation, action, reward)

    @classmethod
    def sparse(cls, observation: Numbers, action: Numbers, reward: Quantizer) -> StepTemplate:
        """Without zero rewards: ``3 4 north`` or ``3 4 north got 1``, and ``finished`` or ``stopped`` at an end."""
        return cls("{observation} {action} [got {reward}] {end}", observation, action, reward)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", tuple(self._parse_pattern()))
        ends = (self.terminated, self.truncated)
        if len(set(ends)) < 2 or any(not end or end.split() != [end] for end in ends):
            raise ValueError(f"The two ends of an episode need different words, got {ends}.")
        self._check_unambiguous()
        self._check_ends()

    @property
    def is_finite(self) -> bool:
        """Whether all quantizers have finitely many words."""
        return all(slot.quantizer is None or isinstance(slot.quantizer, FiniteQuantizer) for slot in self.slots)

    @property
    def writes_every_reward(self) -> bool:
        """Whether also steps with a reward of zero have a word for it."""
        return not any(slot.optional for slot in self.slots)

    def vocabulary(self) -> list[str]:
        """The symbols of all words, each with the space before it, and those inside of words that are spelled.

        Examples:
            >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate
            >>> StepTemplate.compact(Levels(range(2)), Levels(range(1), ["go"]), Levels([0])).vocabulary()
            [' 0', ' 1', ' go', ' 0!', ' 0/']
        """
        found: dict[str, None] = {}
        for slot in self.slots:
            if slot.quantizer is None:
                found.update((f" {word}", None) for word in slot.words if word)
                continue
            first, inner = slot.quantizer.pieces
            if not inner:
                found.update((f" {word}{end}", None) for word, end in product(first, slot.words))
                continue
            found.update((f" {piece}", None) for piece in first)
            found.update((piece, None) for piece in (*inner, *slot.words) if piece)
        return list(found)

    # -- the pattern ---------------------------------------------------------------------------------------------------

    def _parse_pattern(self) -> Iterator[Slot]:
        fields = []
        for group, word in _ITEM.findall(self.pattern):
            items = group.split() if group else [word]
            if group and (items[-1] != "{reward}" or len(items) < 2 or "{" in "".join(items[:-1])):
                raise ValueError(f"Brackets hold words and then {{reward}}, such as [got {{reward}}], got [{group}].")
            for item in items:
                fields += [item] if item in _FIELDS else []
                yield from self._slots_of(item, optional=bool(group))
        wanted = ["{observation}", "{action}", "{reward}{end}"]
        if fields not in (wanted, [*wanted[:2], "{reward}", "{end}"]):
            raise ValueError(
                f"A pattern has the fields {{observation}}, {{action}}, {{reward}} and {{end}} once each, in this "
                f"order, got {self.pattern!r}."
            )

    def _slots_of(self, item: str, *, optional: bool) -> Iterator[Slot]:
        ends = ("", self.terminated, self.truncated)
        if item in ("{observation}", "{action}"):
            numbers = self.observation if item == "{observation}" else self.action
            kind = TokenKind[item[1:-1].upper()]
            if isinstance(numbers, Quantizer):
                yield Slot(kind, numbers)
            else:
                yield from (Slot(kind, each, component) for component, each in enumerate(numbers))
        elif item in ("{reward}", "{reward}{end}"):
            yield Slot(TokenKind.REWARD, self.reward, words=ends if "{end}" in item else ("",), optional=optional)
        elif item == "{end}":
            yield Slot(TokenKind.END, None, words=ends)
        elif set(item) & set("{}[]"):
            raise ValueError(f"A pattern consists of words and the fields {', '.join(_FIELDS)}, got {item!r}.")
        else:
            yield Slot(TokenKind.FORMAT, None, words=(item,), optional=optional)

    def _check_unambiguous(self) -> None:
        """What may be left out must differ from what can stand there instead."""
        for place, slot in enumerate(self.slots):
            is_first = slot.optional and not self.slots[place - 1].optional
            if not is_first and slot.kind != TokenKind.END:
                continue
            others = [other for other in (*self.slots[place + 1 :], self.slots[0]) if not other.optional]
            both = {word for word in slot.words if word and any(_may_hold(other, word) for other in others)}
            if both:
                raise ValueError(
                    f"{sorted(both)} could be read in two ways in the pattern {self.pattern!r}: use other words."
                )

    def _check_ends(self) -> None:
        """A word of reward and end must be readable in one way only."""
        joined = next((slot for slot in self.slots if slot.kind == TokenKind.REWARD and len(slot.words) > 1), None)
        first, inner = self.reward.pieces
        if joined is None:
            return
        words = [word + end for word, end in product(first, joined.words)]
        if inner and set(self.terminated + self.truncated) & {*first, *inner}:
            raise ValueError(f"The ends of spelled rewards have none of the characters {shorten(''.join(inner))}.")
        if not inner and len(set(words)) < len(words):
            raise ValueError(f"Rewards with the ends {self.terminated!r} and {self.truncated!r} repeat a word.")


def _may_hold(slot: Slot, word: str) -> bool:
    """Whether a word may stand in a slot; of spelled ones, whether it has their characters only."""
    if slot.quantizer is None:
        return word in slot.words
    first, inner = slot.quantizer.pieces
    return word in first or (word[0] in first and set(word[1:]) <= set(inner))
