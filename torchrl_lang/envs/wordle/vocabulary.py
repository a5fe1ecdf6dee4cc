"""Tools for word lists: random subsets, and the words that a transcript leaves."""

from __future__ import annotations

import re

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.colour_text import CODE_OF_LETTERS, CODE_OF_SYMBOLS, code_of, tile_colours
from torchrl_lang.envs.wordle.rules import Rules, colours_of_codes
from torchrl_lang.envs.wordle.transcript import Turns, turns_of_rows
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, common_words, load_words

__all__ = ["consistent_words", "count_consistent", "random_words"]

_TURN = re.compile(r"(?<![a-z])([a-z]{5})</a>((?:<[gby]>){5})")
_BETWEEN = re.compile(r"(?<![<a-z])[a-z]+(?![a-z>])|</?[as]>|</eod>|<\|pad\|>|\s+")
"""What else a decoded row may have: letters of guesses without colours, and control tokens."""


def random_words(n: int, words: WordList | None = None, *, include: WordList | None = None, seed: int = 0) -> list[str]:
    """``n`` random words of a list, united with given words; sorted.

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
    every = common_words() if words is None else load_words(words)
    if not 0 <= n <= len(every):
        raise ValueError(f"There are {len(every)} words: take from 0 to {len(every)} of them, got n={n}.")
    chosen = np.random.default_rng(seed).choice(len(every), n, replace=False)
    more = [] if include is None else load_words(include)
    return sorted({*(every[index] for index in chosen.tolist()), *more})


def consistent_words(
    transcript: str | TensorDictBase, words: WordList | None = None, *, rules: Rules = "official"
) -> list[str]:
    """The words of a list that fit all colours of a transcript, in the order of the list.

    Args:
        transcript: a row with the entries of a row, each ``[T]``; or text: a decoded row, in which guesses may lack
            colours, or lines of a guess and its colours as ``b``, ``y`` and ``g`` or as tile emoji.
        words: the list, or its path; default the shipped common words.
        rules: the rules of the colours.

    Raises:
        ValueError: a line or a part of the text is something else.

    Examples:
        >>> from torchrl_lang.envs.wordle import consistent_words
        >>> consistent_words("crane bggbb", ["brash", "trait", "crane", "draft"])
        ['brash', 'trait', 'draft']
        >>> len(consistent_words("<a>crane</a><b><g><g><b><g></s>"))
        12
    """
    every = common_words() if words is None else load_words(words)
    index = WordIndex(every)
    sets = CandidateSets(index.letters, rules)
    turns = _turns_of_text(transcript) if isinstance(transcript, str) else turns_of_rows(transcript[None])
    return [every[word] for word in sets.members(turns.filter(sets))[0].nonzero().flatten().tolist()]


def count_consistent(rows: TensorDictBase, words: WordList | None = None, *, rules: Rules = "official") -> Tensor:
    """The number of words that fit all colours of each row, int64 ``[N]``: the size of the filtered vocabulary.

    Args:
        rows: the entries of a row, ``[N, T]``.
        words: the list, or its path; default the shipped common words.
        rules: the rules of the colours.

    Examples:
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, count_consistent
        >>> words = ["crane", "slate", "point"]
        >>> env = WordleEnv(words, batch_size=[2], seed=0)
        >>> count_consistent(env.reset(), words)
        tensor([3, 3])
    """
    index = WordIndex(common_words() if words is None else load_words(words))
    sets = CandidateSets(index.letters, rules)
    if not len(rows):
        return torch.zeros(0, dtype=torch.int64, device=rows.device)
    return torch.cat([sets.size(turns_of_rows(block).filter(sets)) for block in rows.split(4096)])


def _turns_of_text(text: str) -> Turns:
    """One transcript in a batch of one."""
    if text.lstrip().startswith("<"):
        found = _read_row(text)
    else:
        found = [_read_line(line) for line in text.splitlines() if line.strip()]
    guesses = WordIndex([guess for guess, _ in found] or ["aaaaa"]).letters
    codes = torch.tensor([code for _, code in found] or [0])
    count = torch.tensor([len(found)])
    return Turns(guesses[None], colours_of_codes()[codes][None], count, count)


def _read_row(text: str) -> list[tuple[str, int]]:
    """The guesses with colours of a decoded row, and the codes of their colours."""
    other = _BETWEEN.sub("", _TURN.sub("", text))
    if other:
        raise ValueError(
            f"The transcript {shorten(text)} has {shorten(other)}, which is no part of a guess with its colours: write "
            "guesses as five letters a-z, </a>, and five of <b>, <y> and <g>."
        )
    return [(guess, CODE_OF_SYMBOLS[symbols]) for guess, symbols in _TURN.findall(text)]


def _read_line(line: str) -> tuple[str, int]:
    """A guess and the code of its colours."""
    guess, _, rest = line.strip().partition(" ")
    colours = tile_colours(rest)
    is_grid = colours is not None and len(colours) == WORD_LENGTH
    code = code_of(colours or ()) if is_grid else CODE_OF_LETTERS.get(rest.strip())
    if code is None or not re.fullmatch("[a-z]{5}", guess):
        raise ValueError(
            f"{shorten(line)} is not a guess and its colours: write five letters a-z, a space, and five of b, y and g "
            "or five tile emoji."
        )
    return guess, code
