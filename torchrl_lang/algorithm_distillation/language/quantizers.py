"""Quantizers: numbers as words of a text, and words as numbers again."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one, finite, one_of, positive
from torchrl_lang._files import shorten

__all__ = ["Bins", "Decimals", "FiniteQuantizer", "Levels", "Outside", "Quantizer"]

Outside = Literal["error", "nearest"]
"""What to do with a number that has no word: raise an error, or write the nearest one that has."""

_DECIMAL = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


class Quantizer(ABC):
    """Writes numbers as words without white space. Abstract: see :class:`Levels`, :class:`Bins`, :class:`Decimals`.

    ``read`` of ``write`` is the number after quantising, and quantising a second time changes nothing.
    """

    @abstractmethod
    def write(self, values: Tensor) -> list[str]:
        """The word of each number, ``[N]``; raises ValueError for a number without one."""

    @abstractmethod
    def read(self, words: Sequence[str]) -> Tensor:
        """The number of each word, ``[N]``; raises ValueError for a word that this quantizer does not write."""

    @abstractmethod
    def quantise(self, values: Tensor) -> Tensor:
        """What ``read`` of ``write`` returns, for values of any shape."""

    @property
    @abstractmethod
    def pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What words begin with and what may follow inside them: all words and nothing, or characters."""


class FiniteQuantizer(Quantizer):
    """A quantizer with finitely many words, which it numbers in the order of their values. Abstract.

    Args:
        words: the words.
        levels: int64 or float32 ``[W]``, increasing: the number that each word is read as.
        outside: what to do with numbers that have no word.
    """

    def __init__(self, words: Sequence[str], levels: Tensor, outside: Outside) -> None:
        one_of("outside", outside, ("error", "nearest"))
        self.words, self.levels, self.outside = tuple(words), levels, outside
        if len(self.words) != len(levels) or len(set(self.words)) != len(levels):
            raise ValueError(f"{len(levels)} values need as many different words, got {shorten(self.words)}.")
        if bad := [word for word in self.words if not word or len(word.split()) != 1 or word != word.strip()]:
            raise ValueError(f"Words of a quantizer have no white space and are not empty, got {shorten(bad)}.")
        if not len(levels) or (levels[1:] <= levels[:-1]).any():
            raise ValueError(f"The values of a quantizer increase, got {shorten(levels.tolist())}.")
        self._number = {word: number for number, word in enumerate(self.words)}

    def index(self, values: Tensor) -> Tensor:
        """The number of each value's word, int64 of the shape of ``values``.

        Raises:
            ValueError: a value is not finite, or has no word and ``outside`` is "error".
        """
        exact = values.to(torch.float64)
        if not exact.isfinite().all():
            raise ValueError(f"{type(self).__name__} writes finite numbers, got {_first(exact, ~exact.isfinite())}.")
        index, has_word = self._find(exact)
        if self.outside == "error" and not has_word.all():
            raise ValueError(
                f"{type(self).__name__} has no word for {_first(exact, ~has_word)}, only {self._range()}: give other "
                f"values, or outside='nearest' for the word of the nearest one."
            )
        return index

    def write(self, values: Tensor) -> list[str]:
        """See :class:`Quantizer`."""
        return [self.words[number] for number in self.index(values).tolist()]

    def quantise(self, values: Tensor) -> Tensor:
        """See :class:`Quantizer`."""
        index = self.index(values)
        return self.levels.to(index.device)[index]

    def read(self, words: Sequence[str]) -> Tensor:
        """See :class:`Quantizer`; int64 or float32 as ``levels``."""
        numbers = [self._number.get(word, -1) for word in words]
        if -1 in numbers:
            found = words[numbers.index(-1)]
            raise ValueError(f"{found!r} is no word of a number, expected one of {shorten(self.words)}.")
        return self.levels[torch.tensor(numbers, dtype=torch.int64)]

    @property
    def pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See :class:`Quantizer`."""
        return self.words, ()

    @abstractmethod
    def _find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the nearest word, and whether it is the word of the value itself; values are float64."""

    @abstractmethod
    def _range(self) -> str:
        """The values that have a word, for error messages."""


class Levels(FiniteQuantizer):
    """One word for each of some values, such as the cells of a grid or the names of actions.

    Args:
        values: the values, increasing. They are read as int64 if all are integers, otherwise they are compared and read
            as float32.
        words: their words; default the values in decimal digits.
        outside: "error" refuses other values, "nearest" writes the nearest level (the lower of two).

    Raises:
        ValueError: the values do not increase, or the words are not different words.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language import Levels
        >>> moves = Levels(range(3), ["stay", "up", "down"])
        >>> moves.write(torch.tensor([2, 0])), moves.read(["up"])
        (['down', 'stay'], tensor([1]))
        >>> Levels([0.0, 0.5]).write(torch.tensor([0.2]))
        Traceback (most recent call last):
            ...
        ValueError: Levels has no word for 0.2..., only the levels [0.0, 0.5]: give other values, or ...
    """

    def __init__(
        self, values: Sequence[float], words: Sequence[str] | None = None, *, outside: Outside = "error"
    ) -> None:
        is_integer = all(isinstance(value, int) for value in values)
        levels = torch.tensor(list(values), dtype=torch.int64 if is_integer else torch.float32)
        super().__init__([str(value) for value in values] if words is None else words, levels, outside)

    def _find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.levels.is_floating_point():
            values = values.float().double()
        levels = self.levels.to(values)
        index = torch.searchsorted((levels[1:] + levels[:-1]) / 2, values.contiguous())
        return index, levels[index] == values

    def _range(self) -> str:
        return f"the levels {shorten(self.levels.tolist())}"


class Bins(FiniteQuantizer):
    """A range of numbers cut into bins of one width; a bin is read as its centre, float32.

    Bin ``i`` of ``n`` is ``[low + i * w, low + (i + 1) * w)`` with ``w = (high - low) / n``; the last one has ``high``.
    Bounds and numbers are compared as float32.

    Args:
        low, high: the range.
        count: number of bins.
        prefix: what the words begin with; the rest is the number of the bin.
        outside: "error" refuses numbers outside the range, "nearest" writes its first or last bin.

    Raises:
        ValueError: the range is empty or not finite, or there is no bin.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language import Bins
        >>> bins = Bins(-1, 1, 4)
        >>> bins.write(torch.tensor([-1.0, 0.0, 0.3, 1.0])), bins.read(["0", "3"])
        (['0', '2', '2', '3'], tensor([-0.7500,  0.7500]))
        >>> bins.write(torch.tensor([1.5]))
        Traceback (most recent call last):
            ...
        ValueError: Bins has no word for 1.5, only numbers in [-1, 1]: give other values, or outside='nearest' for ...
    """

    def __init__(self, low: float, high: float, count: int, *, prefix: str = "", outside: Outside = "error") -> None:
        finite("low", low, low=None)
        positive("high - low", high - low)
        at_least_one("count", count)
        self.low, self.high, self.count = low, high, count
        bounds = low + torch.arange(count + 1, dtype=torch.float64) * (high - low) / count
        self._bounds = bounds.to(torch.float32)
        centres = low + (torch.arange(count, dtype=torch.float64) + 0.5) * (high - low) / count
        super().__init__([f"{prefix}{number}" for number in range(count)], centres.to(torch.float32), outside)

    def _find(self, values: Tensor) -> tuple[Tensor, Tensor]:
        values, bounds = values.float().contiguous(), self._bounds.to(values.device)
        index = torch.searchsorted(bounds[1:-1], values, right=True)
        return index, (values >= bounds[0]) & (values <= bounds[-1])

    def _range(self) -> str:
        return f"numbers in [{self.low}, {self.high}]"


class Decimals(Quantizer):
    """Exact decimals: the fewest digits that are read as the same number. Every finite number has a word.

    A word is spelled in characters, so it is several tokens of a template's tokenizer. Integers are written without a
    point and are read as int64. Other numbers are read as float64; those written from float32 are exact after a
    conversion to float32.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language import Decimals
        >>> decimals = Decimals()
        >>> decimals.write(torch.tensor([0.1, -3.0, 1e-7]))
        ['0.1', '-3.0', '1e-07']
        >>> decimals.read(["0.1"]).float() == torch.tensor(0.1)
        tensor([True])
        >>> decimals.write(torch.tensor([torch.inf]))
        Traceback (most recent call last):
            ...
        ValueError: Decimals writes finite numbers, got inf.
    """

    def write(self, values: Tensor) -> list[str]:
        """See :class:`Quantizer`."""
        if not values.isfinite().all():
            raise ValueError(f"Decimals writes finite numbers, got {_first(values, ~values.isfinite())}.")
        return [str(value) for value in np.asarray(values.cpu())]

    def quantise(self, values: Tensor) -> Tensor:
        """See :class:`Quantizer`: nothing changes."""
        return values

    def read(self, words: Sequence[str]) -> Tensor:
        """See :class:`Quantizer`; int64 where all words are those of 64-bit integers, otherwise float64."""
        if bad := [word for word in words if not _DECIMAL.fullmatch(word) or not np.isfinite(float(word))]:
            raise ValueError(f"{bad[0]!r} is not a decimal number such as -0.25 or 1e-07.")
        if words and all(_is_int64(word) for word in words):
            return torch.tensor([int(word) for word in words], dtype=torch.int64)
        return torch.tensor([float(word) for word in words], dtype=torch.float64)

    @property
    def pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See :class:`Quantizer`."""
        return tuple("-0123456789"), tuple("-+.e0123456789")


def _is_int64(word: str) -> bool:
    """Whether a decimal is written as an integer of 64 bits; ``-0`` is none, as it has a sign."""
    return not set(word) & set(".e") and word != "-0" and -(2**63) <= int(word) < 2**63


def _first(values: Tensor, bad: Tensor) -> float:
    """The first bad value, for error messages."""
    return values[bad].flatten()[0].item()
