"""Templates of steps: the words that describe steps of a learning history; steps as text, and text as steps again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

Numbers = Quantizer | Sequence[Quantizer]
"""How an entry of a step is written: one quantizer for an entry of one number ``[L]``, or ``D`` for one ``[L, D]``."""

TEMPLATES = {
    "compact": "{observation} {action} {reward}{end:!|/}",
    "spelled": "at {observation} go {action} got {reward} {end:finished|stopped}",
    "sparse": "{observation} {action} [got {reward}] {end:finished|stopped}",
}
"""Patterns of :class:`StepTemplate` by name."""

_WORDS = r"((?:[^\s{}\[\]]+\s+)*)"
_PATTERN = re.compile(
    rf"\s*{_WORDS}\{{observation\}}\s+{_WORDS}\{{action\}}\s+{_WORDS}"
    rf"(?:\[{_WORDS}(?<=\s)\{{reward\}}\]|\{{reward\}})(\s+{_WORDS})?\{{end:([^\s{{}}|]+)\|([^\s{{}}|]+)\}}\s+{_WORDS}"
)


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
    endings: tuple[str, ...] = ("",)
    """The template's words: one, those of the ends (running, terminated, truncated), or their suffixes."""
    optional: bool = False
    """The slot is left out where the reward is zero."""

    @property
    def pattern(self) -> str:
        """A regular expression of its words, with a group for the number and one for the ending."""
        number = "" if self.quantizer is None else self.quantizer.pattern
        return f"({number})({'|'.join(map(re.escape, reversed(self.endings)))})"

    def words(self, numbers: Sequence[str] | None = None) -> tuple[str, ...]:
        """The words that it may hold with these numbers, by default all of its quantizer, and "" for none."""
        numbers = ("",) if self.quantizer is None else self.quantizer.words if numbers is None else numbers
        return (*(number + ending for number, ending in product(numbers, self.endings)), "")


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
        ValueError: A pattern has words and {observation}, {action}, {reward} or [WORDS {reward}], and {end:...
    """

    pattern: str
    observation: Numbers
    action: Numbers
    reward: Quantizer
    slots: tuple[Slot, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", TEMPLATES.get(self.pattern, self.pattern))
        object.__setattr__(self, "slots", tuple(self._parse_pattern()))
        if both := self._ambiguous():
            raise ValueError(f"{both} could be read in two ways in {self.pattern!r}: use other words.")

    @property
    def is_finite(self) -> bool:
        """Whether all quantizers have finitely many words."""
        return all(slot.quantizer is None or slot.quantizer.is_finite for slot in self.slots)

    @property
    def reward_slot(self) -> Slot:
        """The slot of the reward."""
        return next(slot for slot in self.slots if slot.kind == TokenKind.REWARD)

    def vocabulary(self) -> list[str]:
        """The symbols of all words, each with the space before it, and those inside of words that are spelled.

        Examples:
            >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate
            >>> StepTemplate("compact", Quantizer(range(2)), Quantizer([0], ["go"]), Quantizer([0])).vocabulary()
            [' 0', ' 1', ' go', ' 0!', ' 0/']
        """
        found: dict[str, None] = {}
        for slot in self.slots:
            first, inner = slot.quantizer.pieces if slot.quantizer is not None else (("",), ())
            endings = ("",) if inner else slot.endings
            words = (word + end for word, end in product(first, endings))
            found.update((f" {word}", None) for word in words if word)
            found.update((piece, None) for piece in (*inner, *(slot.endings if inner else ())) if piece)
        return list(found)

    def _parse_pattern(self) -> Iterator[Slot]:
        match = _PATTERN.fullmatch(f"{self.pattern} ")
        if match is None:
            fields = "{observation}, {action}, {reward} or [WORDS {reward}], and {end:TERMINATED|TRUNCATED}"
            raise ValueError(f"A pattern has words and {fields}, in this order, with spaces, got {self.pattern!r}.")
        first, second, third, bracket, apart, fourth, terminated, truncated, last = match.groups()
        ends, optional = ("", terminated, truncated), bracket is not None
        joined = apart is None and not optional
        yield from _words(first)
        yield from _numbers(TokenKind.OBSERVATION, self.observation)
        yield from _words(second)
        yield from _numbers(TokenKind.ACTION, self.action)
        yield from _words(third)
        yield from _words(bracket, optional=True)
        yield Slot(TokenKind.REWARD, self.reward, endings=ends if joined else ("",), optional=optional)
        yield from _words(fourth)
        if not joined:
            yield Slot(TokenKind.END, endings=ends)
        yield from _words(last)

    def _ambiguous(self) -> list[str]:
        """Words that could be read in two ways: where a word may be missing, or a reward and an end are one word."""
        both = list[str]()
        for slot, before in zip(self.slots, (self.slots[-1], *self.slots), strict=False):
            others = [other.pattern for other in self.slots if other is not slot]
            marks = slot.endings if slot.kind == TokenKind.END or (slot.optional and not before.optional) else ()
            both += [word for word in marks if word and any(re.fullmatch(other, word) for other in others)]
            if len(slot.endings) > 1:
                numbers = ("",) if slot.quantizer is None else slot.quantizer.words
                whole = Counter(number + ending for number, ending in product(numbers or ("",), slot.endings))
                both += [word for word, count in whole.items() if count > 1]
                both += [ending for ending in slot.endings[1:] if not numbers and re.fullmatch(DECIMAL, f"1{ending}")]
        return sorted(set(both))


def _words(text: str | None, *, optional: bool = False) -> Iterator[Slot]:
    return (Slot(TokenKind.FORMAT, endings=(word,), optional=optional) for word in (text or "").split())


def _numbers(kind: TokenKind, numbers: Numbers) -> Iterator[Slot]:
    if isinstance(numbers, Quantizer):
        yield Slot(kind, numbers)
    else:
        yield from (Slot(kind, each, component) for component, each in enumerate(numbers))


# -- writing -----------------------------------------------------------------------------------------------------------


def steps_to_text(steps: TensorDictBase, template: StepTemplate) -> str:
    """The text of successive steps of one stream, ``[L]``, words separated by spaces.

    Raises:
        KeyError: an entry is missing.
        ValueError: an entry has another shape than the template's quantizers, or a number has no word.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate, steps_to_text
        >>> from torchrl_lang.algorithm_distillation.language.template import parse_steps
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
    columns = []
    for slot in template.slots:
        words, number = slot_words(steps, template, slot)
        columns.append([words[each] for each in number.tolist()])
    return " ".join(word for step in zip(*columns, strict=True) for word in step if word)


def slot_words(steps: TensorDictBase, template: StepTemplate, slot: Slot) -> tuple[tuple[str, ...], Tensor]:
    """The words that a slot may hold, with "" for none, and the number of that of each step, int64 ``[*B]``.

    Errors are those of :func:`steps_to_text`.
    """
    numbers, index = None, torch.zeros(steps.batch_size, dtype=torch.int64, device=steps.device)
    if slot.quantizer is not None:
        numbers, index = slot.quantizer.number_words(_entry_values(steps, template, slot))
    if len(slot.endings) > 1:
        done, terminated = (entry(steps, key).squeeze(-1) for key in (DONE, TERMINATED))
        index = index * len(slot.endings) + torch.where(terminated, 1, torch.where(done, 2, 0))
    words = slot.words(numbers)
    if slot.optional:
        reward = template.reward.quantise(entry(steps, REWARD).squeeze(-1))
        index = torch.where((reward == 0) & ~reward.signbit(), len(words) - 1, index)  # -0.0 is written
    return words, index


def _entry_values(steps: TensorDictBase, template: StepTemplate, slot: Slot) -> Tensor:
    """The numbers ``[*B]`` of the steps that a slot describes."""
    name = slot.kind.name.lower()
    values = entry(steps, name)
    if slot.kind == TokenKind.REWARD:
        return values.squeeze(-1)
    numbers = template.observation if slot.kind == TokenKind.OBSERVATION else template.action
    expected = [] if isinstance(numbers, Quantizer) else [len(numbers)]
    if (found := list(values.shape[steps.ndim :])) != expected:
        raise ValueError(f"'{name}' of a step has shape {found}, but the template has quantizers for {expected}.")
    return values if slot.component is None else values[..., slot.component]


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_steps(text: str, template: StepTemplate) -> TensorDict:
    """Read the steps ``[L]`` of a text of :func:`steps_to_text`; see there for an example.

    ``episode`` and ``episode_step`` are counted from the ends of episodes; the first step begins an episode.

    Raises:
        ValueError: a step is not one of the template, or incomplete.
    """
    text, place, found = "".join(f" {word}" for word in text.split()), 0, list[tuple[str | None, ...]]()
    groups = groupby(template.slots, key=lambda slot: (slot.optional, slot.kind == TokenKind.END))
    pattern = re.compile("".join(_step_part(slots, any(may_lack)) for may_lack, slots in groups))
    while place < len(text) or not found:
        match = pattern.match(text, place)
        if match is None:
            step = text[place + 1 : place + 60]
            raise ValueError(f"Step {len(found) + 1} of the text, {step!r}, is not one of {template.pattern!r}.")
        place = match.end()
        found.append(match.groups())
    columns, values = list(zip(*found, strict=True)), dict[TokenKind, list[Tensor]]()
    reward, end = torch.zeros(len(found)), torch.zeros(len(found), dtype=torch.int64)
    for slot, numbers, endings in zip(template.slots, columns[::2], columns[1::2], strict=True):
        if len(slot.endings) > 1:
            end = torch.tensor([slot.endings.index(ending or "") for ending in endings])
        if slot.quantizer is not None:
            read = slot.quantizer.read([number for number in numbers if number is not None])
            values.setdefault(slot.kind, []).append(read.float() if read.is_floating_point() else read)
        if slot.kind == TokenKind.REWARD:
            reward[[number is not None for number in numbers]] = values[slot.kind][0].float()
    done, number = end > 0, torch.arange(len(end))
    over = shift_right(done)
    begin = torch.where(over | (number == 0), number, 0).cummax(0).values
    steps = {OBSERVATION: _together(values[TokenKind.OBSERVATION], template.observation)}
    steps |= {ACTION: _together(values[TokenKind.ACTION], template.action), REWARD: reward[:, None]}
    steps |= {DONE: done[:, None], TERMINATED: (end == 1)[:, None]}
    steps |= {EPISODE: over.cumsum(0), EPISODE_STEP: number - begin}
    return TensorDict(steps, batch_size=[len(end)])


def _step_part(slots: Iterable[Slot], may_lack: bool) -> str:
    """The regular expression of successive words of a step, each after a space; they may be missing together."""
    words = "".join(rf" {slot.pattern}(?!\S)" for slot in slots)
    return f"(?:{words})?" if may_lack else words


def _together(components: Sequence[Tensor], numbers: Numbers) -> Tensor:
    return components[0] if isinstance(numbers, Quantizer) else torch.stack(list(components), -1)
