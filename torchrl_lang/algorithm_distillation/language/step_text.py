"""Steps of a learning history as text, and text as steps again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang.algorithm_distillation.language.quantizers import FiniteQuantizer, Quantizer
from torchrl_lang.algorithm_distillation.language.step_template import Numbers, Slot, StepTemplate, TokenKind
from torchrl_lang.functional import shift_right
from torchrl_lang.schema import ACTION, DONE, EPISODE, EPISODE_STEP, OBSERVATION, REWARD, TERMINATED, entry

__all__ = ["Word", "end_index", "entry_values", "has_no_reward", "parse_steps", "steps_to_text", "steps_to_words"]

_ENTRY = {TokenKind.OBSERVATION: OBSERVATION, TokenKind.ACTION: ACTION, TokenKind.REWARD: REWARD}
_NUMBER = re.compile(r"[-+.e0-9]*")
_STATES = ("running", "terminated", "truncated")


class Word(NamedTuple):
    """A word of a step."""

    text: str
    kind: TokenKind


def steps_to_text(steps: TensorDictBase, template: StepTemplate) -> str:
    """The text of successive steps of one stream, ``[L]``, words separated by spaces.

    Raises:
        KeyError: an entry is missing.
        ValueError: an entry has another shape than the template's quantizers, or a number has no word.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate, parse_steps, steps_to_text
        >>> template = StepTemplate.spelled([Levels(range(5))], Levels(range(2), ["west", "east"]), Levels([0, 1]))
        >>> steps = TensorDict(
        ...     observation=torch.tensor([[3], [4]]), action=torch.tensor([1, 0]), reward=torch.tensor([[0.0], [1.0]]),
        ...     done=torch.tensor([[False], [True]]), terminated=torch.tensor([[False], [True]]), batch_size=[2],
        ... )
        >>> steps_to_text(steps, template)
        'at 3 go east got 0 at 4 go west got 1 finished'
        >>> parse_steps(steps_to_text(steps, template), template)["terminated"].squeeze(-1)
        tensor([False,  True])
    """
    return " ".join(word.text for step in steps_to_words(steps, template) for word in step)


def steps_to_words(steps: TensorDictBase, template: StepTemplate) -> list[list[Word]]:
    """The words of each of the steps ``[L]``; errors are those of :func:`steps_to_text`."""
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
        [Word(text, kind) for text, kind in zip(step, kinds, strict=True) if text]
        for step in zip(*columns, strict=True)
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
    key = _ENTRY[slot.kind]
    values = entry(steps, key)
    if slot.kind == TokenKind.REWARD:
        return values.squeeze(-1)
    numbers = template.observation if slot.kind == TokenKind.OBSERVATION else template.action
    expected = [] if isinstance(numbers, Quantizer) else [len(numbers)]
    if list(values.shape[steps.ndim :]) != expected:
        raise ValueError(
            f"'{key}' of a step has shape {list(values.shape[steps.ndim :])}, but the template has quantizers for "
            f"{expected}: give one per number, or one alone for an entry without dimensions."
        )
    return values if slot.component is None else values[..., slot.component]


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_steps(text: str, template: StepTemplate, *, first_episode: int = 0) -> TensorDict:
    """Read the steps ``[L]`` of a text of :func:`steps_to_text`.

    ``episode`` and ``episode_step`` are counted from the ends of episodes; the first step begins an episode.

    Args:
        text: the text.
        template: the template that it was written with.
        first_episode: the number of the first episode.

    Raises:
        ValueError: a word is not what the template has there, or the last step is incomplete. The message has its
            place.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepTemplate, parse_steps
        >>> template = StepTemplate.spelled([Levels(range(5))], Levels(range(2), ["west", "east"]), Levels([0, 1]))
        >>> steps = parse_steps("at 3 go east got 0 at 4 go west got 1 finished", template)
        >>> steps["action"], steps["done"].squeeze(-1)
        (tensor([1, 0]), tensor([False,  True]))
    """
    columns: dict[tuple[TokenKind, int | None], list[str]] = {}
    ends, is_zero = list[int](), list[bool]()
    words = _Reader(text.split())
    readers = [_split_end(slot) for slot in template.slots]
    mark = next((slot.words[0] for slot in template.slots if slot.optional), "")  # what a reward that is written has
    while words.left:
        end, zero = 0, False
        for place, (slot, split) in enumerate(zip(template.slots, readers, strict=True)):
            if slot.optional and not template.slots[place - 1].optional:
                zero = words.next != mark
            if slot.optional and zero:
                continue
            if slot.kind == TokenKind.END:
                end = slot.words.index(words.take("an end")) if words.next in slot.words[1:] else 0
            elif slot.quantizer is None:
                words.expect(slot.words[0])
            else:
                number, found = split(words.take(f"the {slot.kind.name.lower()}"))
                end = found or end
                columns.setdefault((slot.kind, slot.component), []).append(number)
        ends.append(end)
        is_zero.append(zero)
    return _steps(
        columns, torch.tensor(ends, dtype=torch.int64), torch.tensor(is_zero, dtype=torch.bool), template, first_episode
    )


class _Reader:
    """Words that are read one after another."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.place = words, 0

    @property
    def left(self) -> int:
        return len(self.words) - self.place

    @property
    def next(self) -> str:
        return self.words[self.place] if self.left else ""

    def take(self, what: str) -> str:
        if not self.left:
            raise ValueError(f"The text ends after word {self.place}, in a step: expected {what}.")
        self.place += 1
        return self.words[self.place - 1]

    def expect(self, word: str) -> None:
        found = self.take(repr(word))
        if found != word:
            raise ValueError(f"Word {self.place} of the text is {found!r}, expected {word!r}.")


def _split_end(slot: Slot) -> Callable[[str], tuple[str, int]]:
    """A function from a word to the word of its number and how its step ends."""
    if len(slot.words) == 1 or slot.quantizer is None:
        return lambda word: (word, 0)
    if isinstance(slot.quantizer, FiniteQuantizer):
        known = {word + end: (word, place) for word in slot.quantizer.words for place, end in enumerate(slot.words)}
        return lambda word: known.get(word, (word, 0))

    def split(word: str) -> tuple[str, int]:
        match = _NUMBER.match(word)
        number = match.group() if match else ""
        end = word[len(number) :]
        return (number, slot.words.index(end)) if end in slot.words else (word, 0)

    return split


def _steps(
    columns: dict[tuple[TokenKind, int | None], list[str]],
    ends: Tensor,
    is_zero: Tensor,
    template: StepTemplate,
    first_episode: int,
) -> TensorDict:
    """The steps of the words of each number, and of how each step ends, int64 ``[L]``."""
    reward = torch.zeros(len(ends))
    reward[~is_zero] = template.reward.read(columns.get((TokenKind.REWARD, None), [])).to(torch.float32)
    done, terminated = ends > 0, ends == 1
    over = shift_right(done)
    number = over.cumsum(0)
    place = torch.arange(len(ends))
    begin = torch.where(over | (place == 0), place, 0).cummax(0).values if len(ends) else place
    return TensorDict(
        {
            OBSERVATION: _entry(columns, TokenKind.OBSERVATION, template.observation),
            ACTION: _entry(columns, TokenKind.ACTION, template.action),
            REWARD: reward[:, None],
            DONE: done[:, None],
            TERMINATED: terminated[:, None],
            EPISODE: number + first_episode,
            EPISODE_STEP: place - begin,
        },
        batch_size=[len(ends)],
    )


def _entry(columns: dict[tuple[TokenKind, int | None], list[str]], kind: TokenKind, numbers: Numbers) -> Tensor:
    """The values ``[L]`` or ``[L, D]`` of an entry; real numbers as float32."""

    def read(quantizer: Quantizer, component: int | None) -> Tensor:
        values = quantizer.read(columns.get((kind, component), []))
        return values.to(torch.float32) if values.is_floating_point() else values

    if isinstance(numbers, Quantizer):
        return read(numbers, None)
    return torch.stack([read(quantizer, component) for component, quantizer in enumerate(numbers)], -1)
