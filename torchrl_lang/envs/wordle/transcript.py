"""Read the guesses and colours of Wordle rows as tensors."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.rules import (
    CODE_OF_LETTERS,
    CODE_OF_SYMBOLS,
    Rules,
    code_of,
    colours_of_codes,
    tile_colours,
)
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, is_letter, load_words, wordle_tokenizer
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS, entry

__all__ = ["Turns", "consistent_words", "count_consistent", "read_turns"]

_TOKENIZER = wordle_tokenizer()

COLOUR_TOKENS = tuple(_TOKENIZER.encode("<b><y><g>"))
"""Tokens of a black, a yellow and a green square."""


class Turns(NamedTuple):
    """The guesses of a batch of rows that got colours, in order, and their colours: what a :class:`Player` reads."""

    guess: Tensor
    """int64 letters ``[N, M, 5]``, zero after the last guess."""
    colours: Tensor
    """int64 ``[N, M, 5]``: 0 black, 1 yellow, 2 green; zero after the last guess."""
    answered: Tensor
    """int64 ``[N]``: number of guesses that got colours."""
    tries: Tensor
    """int64 ``[N]``: number of guesses, including invalid ones."""

    def rows(self, index: Tensor) -> Turns:
        """The turns of the rows ``index``, an index or mask."""
        return Turns(*(entry[index] for entry in self))

    def until(self, turn: int) -> Turns:
        """The first ``turn`` guesses; later ones stay in the tensors and are not counted."""
        return self._replace(answered=self.answered.clamp_max(turn), tries=self.tries.clamp_max(turn))

    def filter(self, sets: CandidateSets) -> Tensor:
        """The words that fit all colours, as sets uint8 ``[N, C]``."""
        possible = sets.all(self.tries.shape[0])
        for turn in range(self.guess.shape[1]):
            heard = turn < self.answered
            if not heard.any():
                break
            possible = sets.filter(possible, self.guess[:, turn], self.colours[:, turn], heard)
        return possible


def read_turns(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor) -> Turns:
    """Read the guesses and colours of Wordle rows.

    A guess ends with ``</a>``. It is answered if it consists of five letters of the agent and is followed by five
    colours of the environment; other guesses give no information.

    Args:
        tokens: integer ``[N, T]``.
        attention_mask: bool ``[N, T]``.
        agent_mask: bool ``[N, T]``.

    Returns:
        The :class:`Turns` of the rows, with ``M = T // 11`` places for guesses.
    """
    tokens = tokens.to(torch.int64)
    n, width = tokens.shape
    device = tokens.device
    ends, spelled, coloured = _marks(tokens, attention_mask, agent_mask)
    answered = spelled & coloured
    places = max(1, width // (2 * WORD_LENGTH + 1))
    row, end = answered.nonzero(as_tuple=True)
    turn = answered.cumsum(-1)[row, end] - 1
    around = torch.arange(1, WORD_LENGTH + 1, device=device)
    colour_of = torch.zeros(_TOKENIZER.vocab_size, dtype=torch.int64, device=device)
    for colour, token in enumerate(COLOUR_TOKENS):
        colour_of[token] = colour
    guess = torch.zeros((n, places, WORD_LENGTH), dtype=torch.int64, device=device)
    colours = torch.zeros_like(guess)
    guess[row, turn] = tokens[row[:, None], end[:, None] - WORD_LENGTH - 1 + around]
    colours[row, turn] = colour_of[tokens[row[:, None], end[:, None] + around]]
    return Turns(guess, colours, answered.sum(-1), ends.sum(-1))


def turns_of_rows(rows: TensorDictBase) -> Turns:
    """The :func:`read_turns` of the entries of rows ``[N, T]``."""
    return read_turns(*(entry(rows, key) for key in (TOKENS, ATTENTION_MASK, AGENT_MASK)))


def unanswered_guesses(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Utterances of exactly five letters without five colours after them; arguments of :func:`read_turns`.

    Returns:
        Their rows, int64 ``[U]``, and their letters, int64 ``[U, 5]``.
    """
    tokens = tokens.to(torch.int64)
    _, spelled, coloured = _marks(tokens, attention_mask, agent_mask)
    longer = _look(agent_mask & (tokens != _TOKENIZER.control.end_of_action), -WORD_LENGTH - 1)
    row, end = (spelled & ~coloured & ~longer).nonzero(as_tuple=True)
    return row, tokens[row[:, None], end[:, None] + torch.arange(-WORD_LENGTH, 0, device=tokens.device)]


def _marks(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """True at the ends of actions, at those with five letters of the agent, and at those also followed by colours."""
    ends = (tokens == _TOKENIZER.control.end_of_action) & attention_mask
    square = (tokens >= min(COLOUR_TOKENS)) & (tokens <= max(COLOUR_TOKENS)) & attention_mask & ~agent_mask
    letter = is_letter(tokens) & agent_mask
    spelled, coloured = ends, ends
    for distance in range(1, WORD_LENGTH + 1):
        spelled, coloured = spelled & _look(letter, -distance), coloured & _look(square, distance)
    return ends, spelled, coloured


def _look(mask: Tensor, distance: int) -> Tensor:
    """Shift a mask to the left by ``distance`` places (right if negative), filled with False: bool ``[N, T]``."""
    away = torch.zeros_like(mask[:, : abs(distance)])
    if distance > 0:
        return torch.cat([mask[:, distance:], away], -1)
    return torch.cat([away, mask[:, :distance]], -1)


_TURN = re.compile(r"(?<![a-z])([a-z]{5})</a>((?:<[gby]>){5})")
_BETWEEN = re.compile(r"(?<![<a-z])[a-z]+(?![a-z>])|</?[as]>|</eod>|<\|pad\|>|\s+")
"""Further symbols of a decoded row: letters of guesses without colours, and control tokens."""


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
    every = load_words(words)
    sets = CandidateSets(WordIndex(every).letters, rules)
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
    sets = CandidateSets(WordIndex(load_words(words)).letters, rules)
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
        form = "a guess with its colours: five letters a-z, </a>, and five of <b>, <y> and <g>"
        raise ValueError(f"The transcript {shorten(text)} has {shorten(other)}, which is no part of {form}.")
    return [(guess, CODE_OF_SYMBOLS[symbols]) for guess, symbols in _TURN.findall(text)]


def _read_line(line: str) -> tuple[str, int]:
    """A guess and the code of its colours."""
    guess, _, rest = line.strip().partition(" ")
    colours = tile_colours(rest)
    is_grid = colours is not None and len(colours) == WORD_LENGTH
    code = code_of(colours or ()) if is_grid else CODE_OF_LETTERS.get(rest.strip())
    if code is None or not re.fullmatch("[a-z]{5}", guess):
        form = "five letters a-z, a space, and five of b, y and g or five tile emoji"
        raise ValueError(f"{shorten(line)} is not a guess and its colours: write {form}.")
    return guess, code
