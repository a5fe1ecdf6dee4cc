"""Read the guesses and colours of Wordle rows as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.words import WORD_LENGTH, is_letter, wordle_tokenizer
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS, entry

__all__ = ["COLOUR_TOKENS", "Turns", "read_turns", "turns_of_rows", "unanswered_guesses"]

_TOKENIZER = wordle_tokenizer()

COLOUR_TOKENS = tuple(_TOKENIZER.encode("<b><y><g>"))
"""Tokens of a black, a yellow and a green square."""


class Turns(NamedTuple):
    """The guesses of a batch of rows that got colours, in order, and their colours: what a :class:`Player` reads.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.wordle import CandidateSets, Turns, WordIndex, feedback
        >>> words = WordIndex(["crane", "slate", "crate"])
        >>> guess = words.letters[:1, None]  # one game with one guess, crane
        >>> turns = Turns(guess, feedback(guess, words.letters[2]), torch.tensor([1]), torch.tensor([1]))
        >>> turns.colours  # for the word crate
        tensor([[[2, 2, 2, 0, 2]]])
        >>> sets = CandidateSets(words.letters)
        >>> sets.members(turns.filter(sets)).tolist()  # crate is the only word that fits them
        [[False, False, True]]
    """

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

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.wordle import read_turns, wordle_tokenizer
        >>> tokenizer = wordle_tokenizer()
        >>> control = tokenizer.control
        >>> row = [control.begin_action, *tokenizer.encode("crane"), control.end_of_action]
        >>> row += [*tokenizer.encode("<b><y><b><b><g>"), control.end_of_state]
        >>> tokens, agent = torch.tensor([row]), torch.zeros(1, 13, dtype=torch.bool)
        >>> agent[:, 1:7] = True
        >>> turns = read_turns(tokens, torch.ones_like(agent), agent)
        >>> turns.colours, turns.answered, turns.tries
        (tensor([[[0, 1, 0, 0, 2]]]), tensor([1]), tensor([1]))
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
