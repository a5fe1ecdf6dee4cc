"""Read the guesses and colours of Wordle rows as tensors."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import pad

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang.envs.wordle.rules import GREEN, CandidateSets, Rules, feedback, tile_colours
from torchrl_lang.envs.wordle.words import (
    TRIES,
    TURN_LENGTH,
    WORD_LENGTH,
    WordIndex,
    WordList,
    is_letter,
    load_words,
    wordle_tokenizer,
    words_and_guesses,
)
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, ROW_KEYS, TERMINATED, TOKENS, TRUNCATED, entry

__all__ = ["Replayed", "Turns", "consistent_words", "count_consistent", "read_turns", "replay_games", "rows_of_turns"]

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
    ends = (tokens == _TOKENIZER.control.end_of_action) & attention_mask
    square = (tokens >= min(COLOUR_TOKENS)) & (tokens <= max(COLOUR_TOKENS)) & attention_mask & ~agent_mask
    letter, answered = is_letter(tokens) & agent_mask, ends
    for distance in range(1, WORD_LENGTH + 1):
        before, after = pad(letter, (distance, 0))[:, :width], pad(square, (0, distance))[:, distance:]
        answered = answered & before & after
    places = max(1, width // (2 * WORD_LENGTH + 1))
    row, end = answered.nonzero(as_tuple=True)
    turn = answered.cumsum(-1)[row, end] - 1
    around = torch.arange(1, WORD_LENGTH + 1, device=device)
    colour_of = torch.zeros(_TOKENIZER.vocab_size, dtype=torch.int64, device=device)
    colour_of[list(COLOUR_TOKENS)] = torch.arange(3, device=device)
    guess = torch.zeros((n, places, WORD_LENGTH), dtype=torch.int64, device=device)
    colours = torch.zeros_like(guess)
    guess[row, turn] = tokens[row[:, None], end[:, None] - WORD_LENGTH - 1 + around]
    colours[row, turn] = colour_of[tokens[row[:, None], end[:, None] + around]]
    return Turns(guess, colours, answered.sum(-1), ends.sum(-1))


def turns_of_rows(rows: TensorDictBase) -> Turns:
    """The :func:`read_turns` of the entries of rows ``[N, T]``."""
    return read_turns(*(entry(rows, key) for key in (TOKENS, ATTENTION_MASK, AGENT_MASK)))


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
    return torch.cat([sets.size(turns_of_rows(block).filter(sets)) for block in rows.split(_BLOCK)])


def _turns_of_text(text: str) -> Turns:
    """One transcript in a batch of one."""
    if text.lstrip().startswith("<"):
        found = [(guess, colours[1::3]) for guess, colours in _TURN.findall(text)]
        other = [part for part in [_BETWEEN.sub("", _TURN.sub("", text))] if part]
    else:
        lines = [line.strip().partition(" ") for line in text.splitlines() if line.strip()]
        found = [(guess, tile_colours(rest) or rest.strip()) for guess, _, rest in lines]
        other = [" ".join(each) for each in found if not re.fullmatch("[a-z]{5} [byg]{5}", " ".join(each))]
    if other:
        form = "lines of five letters a-z, a space, and five of b, y and g or tile emoji; or a decoded row"
        raise ValueError(f"{shorten(other[0])} is no part of a guess and its colours: write {form}.")
    guesses = WordIndex([guess for guess, _ in found] or ["aaaaa"]).letters
    colours = torch.tensor([["byg".index(colour) for colour in row] for _, row in found] or [[0] * WORD_LENGTH])
    count = torch.tensor([len(found)])
    return Turns(guesses[None], colours[None], count, count)


_CONTROL = _TOKENIZER.control
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
    row = pad(torch.cat([begin, row], -1), (0, (max_tries - turns) * TURN_LENGTH + 1))
    place, length = torch.arange(row.shape[1], device=row.device), 1 + count * TURN_LENGTH
    within = (place - 1) % TURN_LENGTH
    agent = (place > 0) & (within <= WORD_LENGTH) & (place < length[:, None])
    played = torch.arange(turns, device=row.device) < count[:, None]
    reward = torch.zeros(row.shape, device=row.device)
    reward[:, WORD_LENGTH + 1 : 1 + turns * TURN_LENGTH : TURN_LENGTH] = -(played & ~solved).float()
    terminated = (solved & played).any(-1) | (count >= max_tries)
    row = torch.where(place < length[:, None], row, _CONTROL.pad)
    row = torch.where((place == length[:, None]) & terminated[:, None], _CONTROL.end_of_dialogue, row)
    values = row, place < (length + terminated)[:, None], agent, reward
    rows = dict(zip(ROW_KEYS, values, strict=True))
    rows |= {TERMINATED: terminated[:, None], TRUNCATED: ~terminated[:, None]}
    return TensorDict(rows, batch_size=[n], device=row.device)


@checked
def replay_games(
    rows: TensorDictBase,
    words: WordList,
    *,
    rules: Rules = "official",
    old_rules: Rules = "official",
    guesses: WordList | None = None,
    max_tries: Count = TRIES,
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
        >>> from torchrl_lang.envs.wordle.transcript import replay_games
        >>> words = ["crane", "slate", "point", "crate"]
        >>> games = PolicySampler(WordleEnv(words, batch_size=[32]), RandomWordPlayer(words, prob_smart=1.0))
        >>> replayed = replay_games(games(range(32), seed=0), ["slate", "point"], rules="ilql")
        >>> len(replayed.rows) + replayed.left_out["no word of the list fits the colours"]
        32
    """
    every = load_words(words)
    index = WordIndex(every)
    valid = None if guesses is None else WordIndex(words_and_guesses(every, guesses))
    sets = CandidateSets(index.letters, old_rules)
    left_out = dict.fromkeys(_REASONS, 0)
    blocks = []
    for number in torch.arange(len(rows)).split(_BLOCK):
        turns = turns_of_rows(rows[number].cpu())
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
        blocks.append((rows_of_turns(guess, colours, turns.answered, max_tries=max_tries), number, word))
    replayed, kept, hidden = (torch.cat(column) for column in zip(*blocks, strict=True))
    return Replayed(replayed, kept, hidden, left_out)


_REASONS = (
    "a guess got no colours",
    "there are more guesses than max_tries",
    "a guess is not a valid guess",
    "no word of the list fits the colours",
)
"""Why a game is left out; the first reason that applies is counted."""
