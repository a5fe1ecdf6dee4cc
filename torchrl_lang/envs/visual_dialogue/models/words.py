"""The words of the models of visual dialogues."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import shorten

__all__ = ["PAD", "UNKNOWN", "WordIndex", "join_words", "split_words"]

PAD, UNKNOWN, BEGIN, END = range(4)
"""Ids that are not words."""

_SPECIAL = 4
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")
_TYPOGRAPHIC = str.maketrans({"\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{LEFT SINGLE QUOTATION MARK}": "'"})


def split_words(text: str) -> list[str]:
    """The lower-case words of a text; contractions and punctuation are words of their own.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.models.words import split_words
        >>> split_words("No, I can't see; it's dark!")
        ['no', ',', 'i', 'ca', "n't", 'see', ';', 'it', "'s", 'dark', '!']
    """
    return _WORD.findall(text.translate(_TYPOGRAPHIC).lower())


def join_words(words: Iterable[str]) -> str:
    """The text of words: contractions and punctuation follow the word before them without a space.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.models.words import join_words
        >>> join_words(["i", "ca", "n't", "see", ",", "is", "it", "?"])
        "i can't see, is it?"
    """
    return "".join(word if _follows(word) else f" {word}" for word in words).strip()


def _follows(word: str) -> bool:
    return word == "n't" or word.startswith("'") or word in ("?", "!", ".", ",", ";", ":")


class WordIndex:
    """The ids of words; other words have the id of an unknown word.

    Args:
        words: the words, each once.

    Raises:
        ValueError: a word is repeated, or there is none.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.models import WordIndex
        >>> words = WordIndex.of_texts(["is it red?", "it is not"])
        >>> words.ids(["it is blue", "red"])
        tensor([[5, 4, 1],
                [8, 0, 0]])
        >>> words.text([5, 4, 7, 3, 4])
        'it is not'
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(self.words, start=_SPECIAL)}
        if len(self._ids) < len(self.words) or not self.words:
            raise ValueError(f"Give at least one word, and each once, got {shorten(list(words))}.")

    @classmethod
    def of_texts(cls, texts: Iterable[str], *, least: int = 1) -> WordIndex:
        """The words that occur at least ``least`` times in some texts, the most frequent first."""
        at_least_one("least", least)
        counts = Counter(word for text in texts for word in split_words(text))
        return cls(sorted((word for word, many in counts.items() if many >= least), key=lambda w: (-counts[w], w)))

    def __len__(self) -> int:
        """Number of ids: the words and four others."""
        return len(self.words) + _SPECIAL

    def ids(self, texts: Sequence[str], *, longest: int | None = None) -> Tensor:
        """The ids of texts, int64 ``[N, L]``, right-padded to the longest of them, at least 1.

        Args:
            texts: any texts.
            longest: cut texts to this number of words.
        """
        rows = [[self._ids.get(word, UNKNOWN) for word in split_words(text)[:longest]] for text in texts]
        padded = torch.full((len(rows), max(map(len, rows), default=1) or 1), PAD)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        return padded

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids up to the end; ids that are not words are left out."""
        until = list(ids)[: list(ids).index(END)] if END in ids else ids
        return join_words(self.words[each - _SPECIAL] for each in until if each >= _SPECIAL)
