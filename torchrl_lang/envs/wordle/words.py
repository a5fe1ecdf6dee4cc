"""Words: shipped and custom lists, the tokenizer of their letters, and words as tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang._files import read_text, shorten
from torchrl_lang.text.tokenizers import CharTokenizer

WORD_LENGTH = 5
TRIES = 6
"""Number of guesses in the game of newspapers and recipes."""
TURN_LENGTH = 2 * WORD_LENGTH + 2
"""Tokens of a turn with a valid guess: its letters, the end of the action, five colours, the end of the state."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"

WordList = Sequence[str] | str | Path
"""Words as a list or as the path of a text file with one word a line."""

_FOLDER = Path(__file__).parent / "words"


def wordle_tokenizer() -> CharTokenizer:
    """The tokenizer of Wordle, with the 35 symbols and ids of the ILQL paper's code (arXiv 2206.11871).

    The letters are 0 to 25; a green, black and yellow square are ``<g>`` 26, ``<b>`` 27 and ``<y>`` 28; the control
    tokens are ``<|pad|>`` 29, ``</a>`` 30, ``</s>`` 31, ``<s>`` 32, ``<a>`` 33 and ``</eod>`` 34.

    Examples:
        >>> from torchrl_lang.envs.wordle import wordle_tokenizer
        >>> tokenizer = wordle_tokenizer()
        >>> tokenizer.vocab_size, tokenizer.encode("abide<g><b><y>")
        (35, [0, 1, 8, 3, 4, 26, 27, 28])
    """
    return CharTokenizer.from_alphabet([*LETTERS, "<g>", "<b>", "<y>"])


@cache
def _shipped(name: str) -> tuple[str, ...]:
    return tuple((_FOLDER / name).read_text(encoding="ascii").split())


def common_words() -> list[str]:
    """The shipped list of 2,250 common words, sorted: the default hidden words, from SCOWL (``words/NOTICE.txt``)."""
    return list(_shipped("common.txt"))


def guess_words() -> list[str]:
    """The shipped list of 6,706 valid guesses, sorted; it contains the common words.

    Examples:
        >>> from torchrl_lang.envs.wordle import demo_words, guess_words
        >>> set(demo_words(2250)) <= set(guess_words())
        True
    """
    return list(_shipped("guesses.txt"))


def demo_words(n: int = 120) -> list[str]:
    """A fixed subset of the common words, evenly spaced in the sorted list: word ``i * 2250 // n`` for each ``i``.

    Args:
        n: number of words, from 1 to 2,250.

    Raises:
        ValueError: ``n`` is out of range.

    Examples:
        >>> from torchrl_lang.envs.wordle import demo_words
        >>> demo_words(5)
        ['aback', 'crate', 'grown', 'pared', 'sorta']
    """
    words = _shipped("common.txt")
    check_options(**{"the number of words": (n, f"[1, {len(words)}]")})
    return [words[i * len(words) // n] for i in range(n)]


def random_words(n: int, words: WordList | None = None, *, include: WordList = (), seed: int = 0) -> list[str]:
    """Draw ``n`` random words of a list, united with given words; sorted.

    The word lists of the ILQL paper's experiments are such unions, of random official answers and the answers of
    tweeted games.

    Args:
        n: number of random words. The result has more if some words of ``include`` are not among them.
        words: the list, or its path; default the shipped common words.
        include: words that the result must have, a list or a path; they need not be on the list.
        seed: seed of the choice.

    Raises:
        ValueError: the list has fewer than ``n`` words, or a word is invalid.

    Examples:
        >>> from torchrl_lang.envs.wordle import random_words
        >>> words = random_words(5, include=["panic", "solar"], seed=0)
        >>> len(words), "panic" in words
        (7, True)
    """
    every = load_words(words)
    chosen = np.random.default_rng(seed).choice(len(every), n, replace=False)
    return sorted({*(every[index] for index in chosen.tolist()), *(load_words(include) if include else ())})


def load_words(words: WordList | None = None) -> list[str]:
    """Check a word list, given as a list or as a text file with one word per line; default the common words.

    Words are five lower-case letters a-z, without duplicates. Their order is kept: the index of a word is its position.
    White space around a line and empty lines at the end of a file are ignored.

    Raises:
        FileError: the file cannot be read as text.
        ValueError: there is no word, or one is something else or a duplicate; the message names its line or position.
    """
    if words is None:
        return common_words()
    if isinstance(words, str | os.PathLike):
        text = read_text(Path(words), remedy="give a text file in UTF-8 with one word per line")
        entries, first, place = [line.strip() for line in text.rstrip().splitlines()], 1, f"'{Path(words).name}', line"
    else:
        entries, first, place = list(words), 0, "the word list, position"
    if not entries:
        raise ValueError(f"{place.partition(',')[0]} is empty: give at least one word.")
    seen: set[str] = set()
    for number, word in enumerate(entries, start=first):
        if not isinstance(word, str) or not re.fullmatch("[a-z]{5}", word) or word in seen:
            raise ValueError(f"{shorten(word)} of {place} {number} is a duplicate, or not five lower-case letters a-z.")
        seen.add(word)
    return entries


def words_and_guesses(words: Sequence[str], guesses: WordList | None) -> list[str]:
    """The valid guesses: the words, then the other ``guesses``; with ``"words"`` or None there are no others."""
    more = [] if guesses is None or guesses == "words" else load_words(guesses)
    return list(dict.fromkeys([*words, *more]))


class WordIndex(torch.nn.Module):
    """Words as tensors: the letters of each word, and the index of a word from its letters.

    Args:
        words: checked words, as :func:`load_words` returns them.
        device: device of the tensors.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordIndex
        >>> index = WordIndex(["crane", "slate"])
        >>> index.letters
        tensor([[ 2, 17,  0, 13,  4],
                [18, 11,  0, 19,  4]])
        >>> index.find(index.letters.flip(0)), index.text(index.letters[1])
        (tensor([1, 0]), 'slate')
    """

    letters: Tensor
    """int64 ``[W, 5]``."""
    _numbers: Tensor
    _order: Tensor

    def __init__(self, words: Sequence[str], device: torch.device | str | int | None = None) -> None:
        super().__init__()
        letters = torch.tensor([[LETTERS.index(letter) for letter in word] for word in words], device=device)
        numbers, order = word_number(letters).sort()
        self.register_buffer("letters", letters, persistent=False)
        self.register_buffer("_numbers", numbers, persistent=False)
        self.register_buffer("_order", order, persistent=False)

    def __len__(self) -> int:
        return self.letters.shape[0]

    def find(self, letters: Tensor) -> Tensor:
        """Index of each word of ``letters`` (int64 ``[..., 5]``), ``-1`` if it is not on the list; int64 ``[...]``.

        Words with tokens that are not letters are on no list.
        """
        number = word_number(letters)
        place = torch.searchsorted(self._numbers, number).clamp_max(len(self) - 1)
        found = (self._numbers[place] == number) & is_letter(letters).all(-1)
        return torch.where(found, self._order[place], -1)

    @staticmethod
    def text(letters: Tensor) -> str:
        """The word of ``letters`` (int64 ``[5]``)."""
        return "".join(LETTERS[letter] for letter in letters.tolist())


def is_letter(tokens: Tensor) -> Tensor:
    """True for tokens that are letters, which have the ids 0 to 25."""
    return (tokens >= 0) & (tokens < len(LETTERS))


def word_number(letters: Tensor) -> Tensor:
    """The letters as one number in base 26, int64 ``[..., 5]`` to ``[...]``. Sorted words have sorted numbers."""
    return number_of(letters, len(LETTERS))


def number_of(digits: Tensor, base: int) -> Tensor:
    """Five digits as a number, the first the most significant: int64 ``[..., 5]`` to ``[...]``."""
    number = digits[..., 0]
    for position in range(1, WORD_LENGTH):
        number = number * base + digits[..., position]
    return number
