"""Rows of Wordle from guesses and hidden words, and games replayed with other words or rules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.rules import GREEN, Rules, feedback
from torchrl_lang.envs.wordle.transcript import COLOUR_TOKENS, turns_of_rows
from torchrl_lang.envs.wordle.words import (
    TRIES,
    TURN_LENGTH,
    WORD_LENGTH,
    WordIndex,
    WordList,
    load_words,
    wordle_tokenizer,
    words_and_guesses,
)
from torchrl_lang.functional import random_index
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED

__all__ = ["Replayed", "replay_games", "rows_of_turns"]

_CONTROL = wordle_tokenizer().control
_BLOCK = 4096


class Replayed(NamedTuple):
    """Games replayed with other words or rules, and the numbers of the others; see :func:`replay_games`."""

    rows: TensorDict
    """The replayed games, ``[M]``."""
    kept: Tensor
    """The numbers of these games among the given ones, int64 ``[M]``."""
    hidden_word: Tensor
    """The index of each game's hidden word on the new list, int64 ``[M]``."""
    left_out: dict[str, int]
    """Numbers of games that were left out, by reason."""


def rows_of_turns(guess: Tensor, colours: Tensor, count: Tensor, *, max_tries: int = TRIES) -> TensorDict:
    """Rows of games as :class:`~torchrl_lang.envs.WordleEnv` writes them, from valid guesses and their colours.

    Args:
        guess: int64 letters ``[N, M, 5]``.
        colours: int64 ``[N, M, 5]``: 0 black, 1 yellow, 2 green.
        count: number of guesses of each game, int64 ``[N]``, at most ``max_tries``.
        max_tries: number of guesses in a game. A game with fewer that is not solved is ``truncated``.

    Returns:
        The entries of a row, ``terminated`` and ``truncated``, ``[N]``.
    """
    n, turns = guess.shape[:2]
    solved = (colours == GREEN).all(-1)
    squares = torch.tensor(COLOUR_TOKENS, device=guess.device)[colours]
    end_of_action = torch.full_like(guess[..., :1], _CONTROL.end_of_action)
    end_of_state = torch.full_like(end_of_action, _CONTROL.end_of_state)
    row = torch.cat([guess, end_of_action, squares, end_of_state], -1).flatten(1)
    begin = torch.full_like(row[:, :1], _CONTROL.begin_action)
    row = torch.nn.functional.pad(torch.cat([begin, row], -1), (0, (max_tries - turns) * TURN_LENGTH + 1))
    place, length = torch.arange(row.shape[1], device=row.device), 1 + count * TURN_LENGTH
    within = (place - 1) % TURN_LENGTH
    agent = (place > 0) & (within <= WORD_LENGTH) & (place < length[:, None])
    played = torch.arange(turns, device=row.device) < count[:, None]
    reward = torch.zeros(row.shape, device=row.device)
    reward[:, WORD_LENGTH + 1 : 1 + turns * TURN_LENGTH : TURN_LENGTH] = -(played & ~solved).float()
    terminated = (solved & played).any(-1) | (count >= max_tries)
    row = torch.where(place < length[:, None], row, _CONTROL.pad)
    row = torch.where((place == length[:, None]) & terminated[:, None], _CONTROL.end_of_dialogue, row)
    rows = {
        TOKENS: row,
        ATTENTION_MASK: place < (length + terminated)[:, None],
        AGENT_MASK: agent,
        TOKEN_REWARD: reward,
        TERMINATED: terminated[:, None],
        TRUNCATED: ~terminated[:, None],
    }
    return TensorDict(rows, batch_size=[n], device=row.device)


def replay_games(
    rows: TensorDictBase,
    words: WordList,
    *,
    rules: Rules = "official",
    old_rules: Rules = "official",
    guesses: WordList | None = None,
    max_tries: int = TRIES,
    seed: int = 0,
) -> Replayed:
    """Replay games with another word list or other rules: the same guesses, their colours computed again.

    The hidden word of a game is drawn uniformly from the words of the new list that fit all its colours under the old
    rules; of a solved game that is its last guess. So a game stays as long as it was, and a solved one stays solved.
    Games are left out, and counted by reason in ``left_out``, if no word of the list fits, if a guess got no colours or
    is not a valid guess any more, or if there are too many guesses.

    Args:
        rows: rows ``[N, T]``, e.g. ``dataset[:]``.
        words: the new list of hidden words, or its path.
        rules: the new rules.
        old_rules: the rules of ``rows``.
        guesses: the valid guesses beside ``words``, a list or a path; any five letters by default.
        max_tries: number of guesses in a game.
        seed: seed of the choice of hidden words.

    Returns:
        The :class:`Replayed` games, in their old order.

    Raises:
        ValueError: an option or a word list is invalid.

    Examples:
        >>> from torchrl_lang.data import PolicySampler
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
        >>> from torchrl_lang.envs.wordle.replay import replay_games
        >>> words = ["crane", "slate", "point", "crate"]
        >>> games = PolicySampler(WordleEnv(words, batch_size=[32]), RandomWordPlayer(words, prob_smart=1.0))
        >>> replayed = replay_games(games(range(32), seed=0), ["slate", "point"], rules="ilql")
        >>> len(replayed.rows) + replayed.left_out["no word of the list fits the colours"]
        32
    """
    at_least_one("max_tries", max_tries)
    every = load_words(words)
    index = WordIndex(every)
    valid = None if guesses is None else WordIndex(words_and_guesses(every, guesses))
    sets = CandidateSets(index.letters, old_rules)
    left_out = dict.fromkeys(_REASONS, 0)
    blocks, numbers, hidden = [], [], []
    for first in range(0, max(len(rows), 1), _BLOCK):
        block = rows[first : first + _BLOCK]
        turns = turns_of_rows(block.cpu())
        number = first + torch.arange(len(block))
        heard = torch.arange(turns.guess.shape[1]) < turns.answered[:, None]
        unknown = torch.zeros_like(heard) if valid is None else heard & (valid.find(turns.guess) < 0)
        possible = turns.filter(sets)
        size = sets.size(possible)
        faults = (turns.tries != turns.answered, turns.tries > max_tries, unknown.any(-1), size == 0)
        good = torch.ones_like(faults[0])
        for reason, fault in zip(_REASONS, faults, strict=True):
            left_out[reason] += int((good & fault).sum())
            good &= ~fault
        turns, number = turns.rows(good), number[good]
        word = sets.pick(possible[good], random_index(seed, number, size[good]))
        guess = turns.guess[:, :max_tries]
        colours = feedback(guess, index.letters[word][:, None], rules)
        blocks.append(rows_of_turns(guess, colours, turns.answered, max_tries=max_tries))
        numbers.append(number)
        hidden.append(word)
    replayed: TensorDict = torch.cat(blocks)
    return Replayed(replayed, torch.cat(numbers), torch.cat(hidden), left_out)


_REASONS = (
    "a guess got no colours",
    "there are more guesses than max_tries",
    "a guess is not a valid guess",
    "no word of the list fits the colours",
)
"""Why a game is left out; the first reason that applies is counted."""
