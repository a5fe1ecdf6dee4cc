"""Templates of steps: the words that describe steps of a learning history; steps as text, and text as steps again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby, product
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang.algorithm_distillation.language.quantizer import DECIMAL, Quantizer
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.schema import ACTION, DONE, EPISODE, EPISODE_STEP, OBSERVATION, REWARD, TERMINATED, entry

__all__ = ["TEMPLATES", "Slot", "StepTemplate", "TokenKind", "parse_steps", "steps_to_text", "steps_to_words"]

Numbers = Quantizer | Sequence[Quantizer]
"""How an entry of a step is written: one quantizer for an entry of one number ``[L]``, or ``D`` for one ``[L, D]``."""

TEMPLATES = {
    "compact": "{observation} {action} {reward}{end:!|/}",
    "spelled": "at {observation} go {action} got {reward} {end:finished|stopped}",
    "sparse": "{observation} {action} [got {reward}] {end:finished|stopped}",
}
"""Patterns of :class:`StepTemplate` by name."""

_ITEM = re.compile(r"\[([^\]]*)\]|(\S+)")
_FIELD = re.compile(r"\{(?:(observation|action|reward)|end:([^{}|\s]+)\|([^{}|\s]+))\}")


class TokenKind(IntEnum):
    """Subject of a token of a row; the entry ``token_kind`` of rows of the language format holds it."""

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
    quantizer: Quantizer | None = None
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

    A pattern is a sequence of words and of the fields ``{observation}``, ``{action}``, ``{reward}`` and
    ``{end:TERMINATED|TRUNCATED}``, in this order. ``{end:...}`` is a word where an episode ends, one of two, because a
    truncated episode is not terminated; elsewhere it is nothing. Directly after ``{reward}`` it is the end of that
    word, so that all steps have the same number of words. Words and a reward in brackets, such as ``[got {reward}]``,
    are left out of steps whose reward is zero, not of -0.0.

    ===========  ======================================================================
    name         pattern
    ===========  ======================================================================
    ``compact``  ``{observation} {action} {reward}{end:!|/}``
    ``spelled``  ``at {observation} go {action} got {reward} {end:finished|stopped}``
    ``sparse``   ``{observation} {action} [got {reward}] {end:finished|stopped}``
    ===========  ======================================================================

    ``episode`` and ``episode_step`` are not written: reading counts them from the ends. Neither is
    ``action_log_prob``.

    Args:
        pattern: the pattern, or the name of one.
        observation: quantizers of the observation.
        action: quantizers of the action.
        reward: quantizer of the reward.

    Raises:
        ValueError: fields of the pattern are missing, repeated or in another order, or a text of the template could be
            read in two ways.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate
        >>> cells, moves = Quantizer(range(9)), Quantizer(range(2), ["left", "right"])
        >>> StepTemplate("spelled", [cells, cells], moves, Quantizer([0, 1])).pattern
        'at {observation} go {action} got {reward} {end:finished|stopped}'
        >>> StepTemplate("{action} {observation}", cells, moves, Quantizer([0, 1]))
        Traceback (most recent call last):
            ...
        ValueError: A pattern has the fields {observation}, {action}, {reward} and {end:TERMINATED|TRUNCATED} once ...
    """

    pattern: str
    observation: Numbers
    action: Numbers
    reward: Quantizer
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", TEMPLATES.get(self.pattern, self.pattern))
        object.__setattr__(self, "slots", tuple(self._parse_pattern()))
        if both := sorted(self._ambiguous()):
            raise ValueError(f"{both} could be read in two ways in {self.pattern!r}: use other words.")

    @property
    def is_finite(self) -> bool:
        """Whether all quantizers have finitely many words."""
        return all(slot.quantizer is None or slot.quantizer.is_finite for slot in self.slots)

    @property
    def writes_every_reward(self) -> bool:
        """Whether also steps with a reward of zero have a word for it."""
        return not any(slot.optional for slot in self.slots)

    def vocabulary(self) -> list[str]:
        """The symbols of all words, each with the space before it, and those inside of words that are spelled.

        Examples:
            >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate
            >>> StepTemplate("compact", Quantizer(range(2)), Quantizer([0], ["go"]), Quantizer([0])).vocabulary()
            [' 0', ' 1', ' go', ' 0!', ' 0/']
        """
        found: dict[str, None] = {}
        for slot in self.slots:
            first, inner = ((""), ()) if slot.quantizer is None else slot.quantizer.pieces
            if inner:
                found.update((f" {piece}", None) for piece in first)
                found.update((piece, None) for piece in (*inner, *slot.words) if piece)
            else:
                words = (word + end for word, end in product(first or ("",), slot.words))
                found.update((f" {word}", None) for word in words if word)
        return list(found)

    def _parse_pattern(self) -> Iterator[Slot]:
        fields = [match[1] or "end" for match in _FIELD.finditer(self.pattern)]
        if fields != ["observation", "action", "reward", "end"]:
            known = "{observation}, {action}, {reward} and {end:TERMINATED|TRUNCATED}"
            raise ValueError(f"A pattern has the fields {known} once each, in this order, got {self.pattern!r}.")
        for group, word in _ITEM.findall(self.pattern):
            items = group.split() or [word]
            if group and (len(items) < 2 or items[-1] != "{reward}" or "{" in "".join(items[:-1])):
                raise ValueError(f"Brackets hold words and then {{reward}}, such as [got {{reward}}], got [{group}].")
            for item in items:
                yield from self._slots_of(item, optional=bool(group))

    def _slots_of(self, item: str, *, optional: bool) -> Iterator[Slot]:
        fields = [*_FIELD.finditer(item)]
        names = [match[1] or "end" for match in fields]
        ends = ("", fields[-1][2], fields[-1][3]) if names[-1:] == ["end"] else ("",)
        if set(_FIELD.sub("", item)) & set("{}[]") or (names and _FIELD.sub("", item)):
            raise ValueError(f"A pattern consists of words and fields with spaces between them, got {item!r}.")
        if names in (["observation"], ["action"]):
            numbers = self.observation if names == ["observation"] else self.action
            kind = TokenKind[names[0].upper()]
            if isinstance(numbers, Quantizer):
                yield Slot(kind, numbers)
            else:
                yield from (Slot(kind, each, component) for component, each in enumerate(numbers))
        elif names[:1] == ["reward"]:
            yield Slot(TokenKind.REWARD, self.reward, words=ends, optional=optional)
        elif names:
            yield Slot(TokenKind.END, words=ends)
        else:
            yield Slot(TokenKind.FORMAT, words=(item,), optional=optional)

    def _ambiguous(self) -> set[str]:
        """Words that could be read in two ways: where a word may be left out, or a reward and an end are one word."""
        both = set[str]()
        for place, slot in enumerate(self.slots):
            if len(slot.words) > 1 and slot.quantizer is not None:
                first, inner = slot.quantizer.pieces
                words = [word + end for word, end in product(first, slot.words)]
                both |= {word for word in words if words.count(word) > 1} | set("".join(slot.words)) & {*inner}
            if slot.kind == TokenKind.END or (slot.optional and not self.slots[place - 1].optional):
                others = [other for other in (*self.slots[place + 1 :], self.slots[0]) if not other.optional]
                both |= {word for word in slot.words if word and any(_may_hold(other, word) for other in others)}
            both |= {word for word in slot.words if slot.words.count(word) > 1}
        return both


def _may_hold(slot: Slot, word: str) -> bool:
    """Whether a word may stand in a slot; of spelled ones, whether it has their characters only."""
    if slot.quantizer is None:
        return word in slot.words
    first, inner = slot.quantizer.pieces
    return word in first or (word[0] in first and set(word[1:]) <= set(inner))


# -- writing -----------------------------------------------------------------------------------------------------------

_ENTRY = {TokenKind.OBSERVATION: OBSERVATION, TokenKind.ACTION: ACTION, TokenKind.REWARD: REWARD}


def steps_to_text(steps: TensorDictBase, template: StepTemplate) -> str:
    """The text of successive steps of one stream, ``[L]``, words separated by spaces.

    Raises:
        KeyError: an entry is missing.
        ValueError: an entry has another shape than the template's quantizers, or a number has no word.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate, parse_steps, steps_to_text
        >>> moves = Quantizer(range(2), ["west", "east"])
        >>> template = StepTemplate("spelled", [Quantizer(range(5))], moves, Quantizer([0, 1]))
        >>> steps = TensorDict(
        ...     observation=torch.tensor([[3], [4]]), action=torch.tensor([1, 0]), reward=torch.tensor([[0.0], [1.0]]),
        ...     done=torch.tensor([[False], [True]]), terminated=torch.tensor([[False], [True]]), batch_size=[2],
        ... )
        >>> steps_to_text(steps, template)
        'at 3 go east got 0 at 4 go west got 1 finished'
        >>> parse_steps(steps_to_text(steps, template), template)["terminated"].squeeze(-1)
        tensor([False,  True])
    """
    return " ".join(word for step in steps_to_words(steps, template) for word, _ in step)


def steps_to_words(steps: TensorDictBase, template: StepTemplate) -> list[list[tuple[str, TokenKind]]]:
    """The words of each of the steps ``[L]``, and their kinds; errors are those of :func:`steps_to_text`."""
    ends = end_index(steps).tolist()
    is_zero = has_no_reward(steps, template).tolist()
    columns: list[list[str]] = []
    for slot in template.slots:
        words = [""] * len(ends)
        if slot.quantizer is not None:
            words = slot.quantizer.write(entry_values(steps, template, slot))
        suffixes = [slot.words[end] if len(slot.words) > 1 else slot.words[0] for end in ends]
        column = [word + suffix for word, suffix in zip(words, suffixes, strict=True)]
        columns.append(["" if slot.optional and zero else word for word, zero in zip(column, is_zero, strict=True)])
    kinds = [slot.kind for slot in template.slots]
    return [
        [(text, kind) for text, kind in zip(step, kinds, strict=True) if text] for step in zip(*columns, strict=True)
    ]


def end_index(steps: TensorDictBase) -> Tensor:
    """How each step ends, int64 ``[*B]``: 0 for a running episode, 1 for a terminated and 2 for a truncated one."""
    done, terminated = (entry(steps, key).squeeze(-1) for key in (DONE, TERMINATED))
    return torch.where(terminated, 1, torch.where(done, 2, 0))


def has_no_reward(steps: TensorDictBase, template: StepTemplate) -> Tensor:
    """Whether each step's reward is read as zero, bool ``[*B]``; it is not where that is -0.0."""
    reward = template.reward.quantise(entry(steps, REWARD).squeeze(-1))
    return (reward == 0) & ~reward.signbit()


def entry_values(steps: TensorDictBase, template: StepTemplate, slot: Slot) -> Tensor:
    """The numbers ``[*B]`` of the steps that a slot describes.

    Raises:
        KeyError: the entry is missing.
        ValueError: it has another shape than the template's quantizers.
    """
    values = entry(steps, _ENTRY[slot.kind])
    if slot.kind == TokenKind.REWARD:
        return values.squeeze(-1)
    numbers = template.observation if slot.kind == TokenKind.OBSERVATION else template.action
    expected = [] if isinstance(numbers, Quantizer) else [len(numbers)]
    if (found := list(values.shape[steps.ndim :])) != expected:
        name = _ENTRY[slot.kind]
        raise ValueError(f"'{name}' of a step has shape {found}, but the template has quantizers for {expected}.")
    return values if slot.component is None else values[..., slot.component]


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_steps(text: str, template: StepTemplate, *, first_episode: int = 0) -> TensorDict:
    """Read the steps ``[L]`` of a text of :func:`steps_to_text`; see there for an example.

    ``episode`` and ``episode_step`` are counted from the ends of episodes; the first step begins an episode.

    Args:
        text: the text.
        template: the template that it was written with.
        first_episode: the number of the first episode.

    Raises:
        ValueError: a step is not one of the template, or incomplete.
    """
    text, pattern = "".join(f" {word}" for word in text.split()), _step_pattern(template)
    ends, is_zero, place = list[int](), list[bool](), 0
    columns: dict[tuple[TokenKind, int | None], list[str]] = {}
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            step = text[place + 1 : place + 60]
            raise ValueError(f"Step {len(ends) + 1} of the text, {step!r}, is not one of {template.pattern!r}.")
        place, found, end = match.end(), iter(match.groups()), 0
        for slot in template.slots:
            if slot.quantizer is not None and (number := next(found)) is not None:
                columns.setdefault((slot.kind, slot.component), []).append(number)
            if slot.kind == TokenKind.REWARD:
                is_zero.append(number is None)
            if len(slot.words) > 1:
                end = slot.words.index(next(found) or "")
        ends.append(end)
    return _steps(columns, torch.tensor(ends).long(), torch.tensor(is_zero).bool(), template, first_episode)


def _step_pattern(template: StepTemplate) -> re.Pattern[str]:
    """The pattern of one step, with a space before each word, and a group for each number and each end."""
    pattern = ""
    for optional, slots in groupby(template.slots, key=lambda slot: slot.optional):
        words = [_slot_pattern(slot) for slot in slots]
        pattern += f"(?:{''.join(words)})?" if optional else "".join(words)
    return re.compile(pattern)


def _slot_pattern(slot: Slot) -> str:
    ends = f"({'|'.join(re.escape(word) for word in reversed(slot.words))})" if len(slot.words) > 1 else ""
    if slot.quantizer is None:
        return f"(?: {ends}(?!\\S))?" if ends else f" {re.escape(slot.words[0])}(?!\\S)"
    number = "|".join(map(re.escape, slot.quantizer.words)) or DECIMAL
    return f" ({number}){ends}(?!\\S)"


def _steps(
    columns: dict[tuple[TokenKind, int | None], list[str]],
    ends: Tensor,
    is_zero: Tensor,
    template: StepTemplate,
    first_episode: int,
) -> TensorDict:
    """The steps of the words of each number, and of how each step ends, int64 ``[L]``."""

    def read(kind: TokenKind, quantizer: Quantizer, component: int | None) -> Tensor:
        values = quantizer.read(columns.get((kind, component), []))
        return values.to(torch.float32) if values.is_floating_point() else values

    def read_all(kind: TokenKind, numbers: Numbers) -> Tensor:
        if isinstance(numbers, Quantizer):
            return read(kind, numbers, None)
        return torch.stack([read(kind, each, component) for component, each in enumerate(numbers)], -1)

    reward = torch.zeros(len(ends))
    reward[~is_zero] = read(TokenKind.REWARD, template.reward, None).to(torch.float32)
    done, place = ends > 0, torch.arange(len(ends))
    over = shift_right(done)
    begin = torch.where(over | (place == 0), place, 0).cummax(0).values if len(ends) else place
    return TensorDict(
        {
            OBSERVATION: read_all(TokenKind.OBSERVATION, template.observation),
            ACTION: read_all(TokenKind.ACTION, template.action),
            REWARD: reward[:, None],
            DONE: done[:, None],
            TERMINATED: (ends == 1)[:, None],
            EPISODE: over.cumsum(0) + first_episode,
            EPISODE_STEP: place - begin,
        },
        batch_size=[len(ends)],
    )
