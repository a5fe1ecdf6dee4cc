"""Words of the models of visual dialogues, and dialogues as tensors of word ids."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchrl_lang._files import shorten
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue

__all__ = [
    "DialogueBatch",
    "MAX_WORDS",
    "PAD",
    "UNKNOWN",
    "WordIndex",
    "join_words",
    "split_words",
    "with_begin_and_end",
]

PAD, UNKNOWN, BEGIN, END = range(4)
"""Ids that are not words."""

_SPECIAL = 4
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")
_TYPOGRAPHIC = str.maketrans({"\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{LEFT SINGLE QUOTATION MARK}": "'"})


def split_words(text: str) -> list[str]:
    """The lower-case words of a text; contractions and punctuation are words of their own."""
    return _WORD.findall(text.translate(_TYPOGRAPHIC).lower())


def join_words(words: Iterable[str]) -> str:
    """The text of words: contractions and punctuation follow the word before them without a space."""
    return "".join(word if _follows(word) else f" {word}" for word in words).strip()


def _follows(word: str) -> bool:
    return word == "n't" or word.startswith("'") or word in ("?", "!", ".", ",", ";", ":")


class WordIndex:
    """The ids of words; other words have the id of an unknown word.

    Args:
        words: the words, each once.

    Raises:
        ValueError: a word is repeated, or there is none.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(self.words, start=_SPECIAL)}
        if len(self._ids) < len(self.words) or not self.words:
            raise ValueError(f"Give at least one word, and each once, got {shorten(list(words))}.")

    @classmethod
    def of_texts(cls, texts: Iterable[str], *, least: int = 1) -> WordIndex:
        """The words that occur at least ``least`` times in some texts, the most frequent first."""
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


MAX_WORDS = 40
"""Words of a caption, question or answer that the models read."""


class DialogueBatch(NamedTuple):
    """Dialogues of different numbers of rounds, right-padded."""

    caption: Tensor
    """Int64 ``[N, L]``."""
    questions: Tensor
    """Int64 ``[N, R, L]``."""
    answers: Tensor
    """Int64 ``[N, R, L]``."""
    rounds: Tensor
    """Number of rounds, int64 ``[N]``."""

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], words: WordIndex) -> DialogueBatch:
        """The ids of dialogues."""
        rounds = torch.tensor([len(each.rounds) for each in dialogues], dtype=torch.int64)
        pairs = [each for dialogue in dialogues for each in dialogue.rounds]
        return cls(
            words.ids([each.caption for each in dialogues], longest=MAX_WORDS),
            _placed(words.ids([each.question for each in pairs], longest=MAX_WORDS), rounds),
            _placed(words.ids([each.answer for each in pairs], longest=MAX_WORDS), rounds),
            rounds,
        )

    def to(self, device: torch.device | str) -> DialogueBatch:
        """The batch on a device."""
        return DialogueBatch(*(each.to(device) for each in self))

    def rows(self, index: Tensor) -> DialogueBatch:
        """Some of the dialogues."""
        return DialogueBatch(*(each[index] for each in self))


def with_begin_and_end(ids: Tensor) -> Tensor:
    """Right-padded ids ``[..., L]`` with the begin id in front and the end id behind, ``[..., L + 2]``."""
    wider = functional.pad(ids, (1, 1), value=PAD)
    wider[..., 0] = BEGIN
    return wider.scatter(-1, (ids != PAD).sum(-1, keepdim=True) + 1, END)


def _placed(ids: Tensor, rounds: Tensor) -> Tensor:
    """The ids ``[N, R, L]`` of texts ``[sum(rounds), L]`` in the order of dialogues and rounds."""
    most = int(rounds.max()) if len(rounds) else 0
    placed = torch.full((len(rounds), most, ids.shape[-1]), PAD)
    placed[torch.arange(most) < rounds[:, None]] = ids
    return placed
