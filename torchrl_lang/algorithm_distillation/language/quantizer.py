"""A quantizer: numbers as words of a text, and words as numbers again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._checks import Count, check_options, checked
from torchrl_lang._files import shorten

DECIMAL = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
"""Pattern of the words of :meth:`Quantizer.decimals`."""


class Quantizer:
    """Writes numbers as words without white space: one for each of some values, one for each bin of a range, or digits.

    ``read`` of ``write`` is the number after quantising, and quantising a second time changes nothing.

    Args:
        values: the values, increasing, such as the cells of a grid. They are read as int64 if all are integers,
            otherwise they are compared and read as float32.
        words: their words; default the values in decimal digits.
        outside: "error" refuses other values, "nearest" writes the nearest one (the lower of two).

    Attributes:
        words: the words in the order of their values; none of decimals.
        levels: int64 or float32 ``[W]``: the number that each word is read as.

    Raises:
        ValueError: the values do not increase, or the words are not different words.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer
        >>> moves = Quantizer(range(3), ["stay", "up", "down"])
        >>> moves.write(torch.tensor([2, 0])), moves.read(["up"])
        (['down', 'stay'], tensor([1]))
        >>> Quantizer([0.0, 0.5]).write(torch.tensor([0.2]))
        Traceback (most recent call last):
            ...
        ValueError: There is no word for 0.2..., only for [0.0, 0.5]: give outside='nearest' for ...
    """

    @checked
    def __init__(
        self,
        values: Sequence[float],
        words: Sequence[str] | None = None,
        *,
        outside: Literal["error", "nearest"] = "error",
    ) -> None:
        is_integer = all(isinstance(value, int) for value in values)
        self.levels = torch.tensor(list(values), dtype=torch.int64 if is_integer else torch.float32)
        self.words, self.outside = tuple(map(str, values) if words is None else words), outside
        self._edges: Tensor | None = None
        are_words = all(word.split() == [word] for word in self.words) and len(set(self.words)) == len(self.words)
        if not are_words or not len(self.words) == len(self.levels) > 0 or (self.levels.diff() <= 0).any():
            found = f"{shorten(self.levels.tolist())} and {shorten(self.words)}"
            raise ValueError(f"A quantizer has increasing values and different words without spaces, got {found}.")
        self._number = {word: number for number, word in enumerate(self.words)}

    @classmethod
    @checked
    def bins(
        cls, low: float, high: float, count: Count, *, prefix: str = "", outside: Literal["error", "nearest"] = "error"
    ) -> Quantizer:
        """A range cut into bins of one width; a bin is written as its number, and read as its centre.

        Bin ``i`` of ``n`` is ``[low + i * w, low + (i + 1) * w)`` with ``w = (high - low) / n``; the last one has
        ``high``. Bounds and numbers are compared as float32.

        Args:
            low: the lower end of the range.
            high: its upper end.
            count: number of bins.
            prefix: of the words, before the number of the bin.
            outside: "error" refuses numbers outside the range, "nearest" writes its first or last bin.

        Examples:
            >>> import torch
            >>> from torchrl_lang.algorithm_distillation.language import Quantizer
            >>> bins = Quantizer.bins(-1, 1, 4)
            >>> bins.write(torch.tensor([-1.0, 0.0, 0.3, 1.0])), bins.read(["0", "3"])
            (['0', '2', '2', '3'], tensor([-0.7500,  0.7500]))
        """
        check_options(**{"high - low": (high - low, "(0, inf)")})
        place = torch.arange(count + 1, dtype=torch.float64)
        centres = (low + (place[:-1] + 0.5) * (high - low) / count).to(torch.float32)
        made = cls(centres.tolist(), [f"{prefix}{number}" for number in range(count)], outside=outside)
        made._edges = (low + place * (high - low) / count).to(torch.float32)
        return made

    @classmethod
    def decimals(cls) -> Quantizer:
        """Exact decimals: the fewest digits that are read as the same number. Every finite number has a word.

        A word is spelled in characters, so it is several tokens of a template's tokenizer. Integers are read as int64,
        other numbers as float64; those written from float32 are exact after a conversion to float32.

        Examples:
            >>> import torch
            >>> from torchrl_lang.algorithm_distillation.language import Quantizer
            >>> Quantizer.decimals().write(torch.tensor([0.1, -3.0, 1e-7]))
            ['0.1', '-3.0', '1e-07']
        """
        made = cls.__new__(cls)
        made.words, made.levels, made.outside, made._edges = (), torch.zeros(0), "error", None
        return made

    @property
    def is_finite(self) -> bool:
        """Whether it has a word for each value or bin, not decimals."""
        return bool(self.words)

    @property
    def pattern(self) -> str:
        """A regular expression of its words."""
        return "|".join(map(re.escape, self.words)) or DECIMAL

    @property
    def pieces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Beginnings of words and further pieces inside them: all words and nothing, or characters."""
        return (self.words, ()) if self.words else (tuple("-0123456789"), tuple("-+.e0123456789"))

    def index(self, values: Tensor) -> Tensor:
        """The number of each value's word, int64 of the shape of ``values``.

        Raises:
            ValueError: a value is not finite, or has no word and ``outside`` is "error".
        """
        exact = _finite(values)
        if self._edges is None:
            exact = exact.float().double() if self.levels.is_floating_point() else exact
            levels = self.levels.to(exact)
            index = torch.searchsorted((levels[1:] + levels[:-1]) / 2, exact.contiguous())
            has_word = levels[index] == exact
        else:
            single, edges = exact.float().contiguous(), self._edges.to(exact.device)
            index = torch.searchsorted(edges[1:-1], single, right=True)
            has_word = (single >= edges[0]) & (single <= edges[-1])
        if self.outside == "error" and not has_word.all():
            known = self.levels if self._edges is None else self._edges[[0, -1]]
            found = f"{exact[~has_word].flatten()[0].item()}, only for {shorten(known.tolist())}"
            raise ValueError(f"There is no word for {found}: give outside='nearest' for the word of the nearest one.")
        return index

    def number_words(self, values: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Words, and the number of each value's word among them, int64 of the shape of ``values``."""
        if self.words:
            return self.words, self.index(values)
        written = self.write(values.flatten())
        number = {word: place for place, word in enumerate(dict.fromkeys(written))}
        index = torch.tensor([number[word] for word in written], device=values.device, dtype=torch.int64)
        return tuple(number), index.view(values.shape)

    def write(self, values: Tensor) -> list[str]:
        """The word of each number, ``[N]``; raises ValueError for a number without one."""
        if self.words:
            return [self.words[number] for number in self.index(values).tolist()]
        _finite(values)
        return [str(value) for value in np.asarray(values.cpu())]

    def quantise(self, values: Tensor) -> Tensor:
        """The same as ``read`` of ``write``, for values of any shape."""
        if not self.words:
            return values
        index = self.index(values)
        return self.levels.to(index.device)[index]

    def read(self, words: Sequence[str]) -> Tensor:
        """The number of each word, ``[N]``; raises ValueError for a word that this quantizer does not write."""
        known = self._number.__contains__ if self.words else re.compile(DECIMAL).fullmatch
        if bad := [word for word in words if not known(word)]:
            expected = f"one of {shorten(self.words)}" if self.words else "a decimal number such as -0.25 or 1e-07"
            raise ValueError(f"{bad[0]!r} is no word of a number, expected {expected}.")
        if self.words:
            return self.levels[torch.tensor([self._number[word] for word in words], dtype=torch.int64)]
        if words and all(_is_int64(word) for word in words):
            return torch.tensor([int(word) for word in words], dtype=torch.int64)
        return _finite(torch.tensor([float(word) for word in words], dtype=torch.float64))


def _finite(values: Tensor) -> Tensor:
    """Values as float64; raises ValueError if one is not finite."""
    exact = values.to(torch.float64)
    if not (is_finite := exact.isfinite()).all():
        raise ValueError(f"A quantizer writes finite numbers, got {exact[~is_finite].flatten()[0].item()}.")
    return exact


def _is_int64(word: str) -> bool:
    """Whether a decimal is written as an integer of 64 bits; ``-0`` is none, as it has a sign."""
    return not set(word) & set(".e") and word != "-0" and -(2**63) <= int(word) < 2**63
