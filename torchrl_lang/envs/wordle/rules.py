"""The rules of Wordle: the colours of a guess, by letter or as one of 243 codes."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_lang._checks import check_options, checked
from torchrl_lang.envs.wordle.words import LETTERS, WORD_LENGTH, number_of

Rules = Literal["official", "ilql"]

BLACK, YELLOW, GREEN = 0, 1, 2

SOLVED = 3**WORD_LENGTH - 1
"""The code of five green squares."""


def feedback(guess: Tensor, word: Tensor, rules: Rules = "official") -> Tensor:
    """The colours of ``guess`` if ``word`` is hidden.

    A letter in its place is green. Under the rules ``"ilql"`` (Snell et al. 2022, arXiv 2206.11871) any other letter is
    yellow if the word contains it. Under the ``"official"`` rules of the newspaper's game, each letter of the word that
    is not green makes at most one equal letter of the guess yellow, from left to right.

    Args:
        guess: int64 letters ``[..., 5]``.
        word: int64 letters ``[..., 5]``, broadcast against ``guess``.
        rules: ``"official"`` or ``"ilql"``.

    Returns:
        int64 ``[..., 5]``: 0 black, 1 yellow, 2 green.

    Raises:
        ValueError: the rules are unknown.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordIndex
        >>> from torchrl_lang.envs.wordle.rules import feedback
        >>> speed, abide = WordIndex(["speed", "abide"]).letters
        >>> feedback(speed, abide, "ilql")
        tensor([0, 0, 1, 1, 1])
        >>> feedback(speed, abide)  # abide has only one e
        tensor([0, 0, 1, 0, 1])
    """
    check_options(rules=(rules, get_args(Rules)))
    guess, word = torch.broadcast_tensors(guess, word)
    code = answer(guess, word, rules)
    return colours_of_codes(code.device)[code.long()]


def answer(guess: Tensor, word: Tensor, rules: Rules = "official") -> Tensor:
    """The code of :func:`feedback`, uint8 ``[...]``; ``guess`` and ``word`` have as many dimensions as each other."""
    code, *colours = _colours(_planes(guess), _planes(word), rules)
    for colour in colours:
        code = torch.add(colour, code, alpha=3)
    return code


def colours_of_codes(device: torch.device | None = None) -> Tensor:
    """The five colours of each code, int64 ``[243, 5]``."""
    code = torch.arange(SOLVED + 1, device=device)[:, None]
    return code // 3 ** torch.arange(WORD_LENGTH - 1, -1, -1, device=device) % 3


def feedback_code(colours: Tensor) -> Tensor:
    """Five colours as one number in base 3, the first the most significant: int64 ``[..., 5]`` to ``[...]``."""
    return number_of(colours, 3)


@checked
def feedback_table(guesses: Tensor, words: Tensor, rules: Rules = "official") -> Tensor:
    """Compute the code of every guess for every word: letters ``[G, 5]``, ``[W, 5]`` to uint8 ``[G, W]``."""
    step = max(1, 2**15 // words.shape[0])  # this many pairs and their colours fit into the processor's cache
    return torch.cat([answer(some[:, None], words[None], rules) for some in guesses.split(step)])


def _planes(letters: Tensor) -> Tensor:
    """The letters by place, uint8 ``[5, ...]``: the processor handles long rows of bytes faster."""
    return letters.movedim(-1, 0).to(torch.uint8, memory_format=torch.contiguous_format)


def _colours(guess: Tensor, word: Tensor, rules: Rules) -> list[Tensor]:
    """The colours by place, five uint8 ``[...]``, of guesses and words by place."""
    green = guess == word
    if rules == "official":
        # Each letter of the word that is not green makes one equal letter of the guess yellow, from left to right.
        # Green letters are replaced by values that equal no other.
        guess, word = guess + 64 * green.to(torch.uint8), word + 128 * green.to(torch.uint8)
    guesses, words = guess.unbind(0), word.unbind(0)
    colours = []
    none = torch.zeros_like(green[0], dtype=torch.uint8)
    for i in range(WORD_LENGTH):
        there = before = none
        for letter in words:
            there = there + (guesses[i] == letter)
        if rules == "official":
            for letter in guesses[:i]:
                before = before + (guesses[i] == letter)
        colours.append(torch.where(green[i], GREEN, (there > before).to(torch.uint8)))
    return colours


TILE_COLOURS = {"⬛": "b", "⬜": "b", "🟨": "y", "🟦": "y", "🟩": "g", "🟧": "g"}
"""Tiles of the dark and the light theme, and blue and orange for high contrast."""

_VARIATION = "\N{VARIATION SELECTOR-16}"  # may follow an emoji and changes nothing

LETTERS_OF_CODE = ["".join("byg"[colour] for colour in colours) for colours in colours_of_codes().tolist()]
"""Five letters for the colours of each of the 243 codes, such as ``bybbg``."""
CODE_OF_LETTERS = {letters: code for code, letters in enumerate(LETTERS_OF_CODE)}
CODE_OF_SYMBOLS = {"".join(f"<{letter}>" for letter in letters): code for letters, code in CODE_OF_LETTERS.items()}
"""The codes of the tokenizer's symbols, such as ``<b><y><b><b><g>``."""


def tile_colours(text: str) -> str | None:
    """The colours of a line that consists of tiles only, of any number, such as ``bybbg``; None for other lines."""
    tiles = text.replace(_VARIATION, "").strip()
    return "".join(map(TILE_COLOURS.__getitem__, tiles)) if tiles and set(tiles) <= TILE_COLOURS.keys() else None


_SEEN = WORD_LENGTH + 1  # a word has a letter from 0 to 5 times


class CandidateSets(torch.nn.Module):
    """Sets of words of one list, stored as bits, and their filtering by feedback.

    A guess and its colours give five clues about a word, one per place: "has this letter here" or "has not", and "has
    the letter exactly ``n`` times" or "at least ``n`` times". The set of words that agree with a clue is computed once;
    filtering intersects a set with five of them. So a guess need not be on the list.

    Args:
        letters: int64 ``[W, 5]``, the words of the list.
        rules: ``"official"`` or ``"ilql"``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.wordle import WordIndex
        >>> from torchrl_lang.envs.wordle.rules import CandidateSets
        >>> from torchrl_lang.envs.wordle.rules import feedback
        >>> index = WordIndex(["crane", "crate", "slate", "point"])
        >>> sets = CandidateSets(index.letters)
        >>> crane, crate, slate, _ = index.letters
        >>> possible = sets.filter(sets.all(1), crane[None], feedback(crane, slate)[None])
        >>> sets.members(possible), sets.size(possible)
        (tensor([[False, False,  True, False]]), tensor([1]))
    """

    clues: Tensor
    _members_of: Tensor
    _rank_in: Tensor
    _size_of: Tensor

    @checked
    def __init__(self, letters: Tensor, rules: Rules = "official") -> None:
        super().__init__()
        self.rules = rules
        self.n_words = letters.shape[0]
        # The eight bits of each byte, lowest first, int64 [256, 8].
        byte = torch.arange(256, device=letters.device)[:, None] >> torch.arange(8, device=letters.device) & 1
        # Eight bools as one int64, so that unpacking takes one lookup per byte.
        self.register_buffer("_members_of", byte.bool().view(torch.int64)[:, 0].clone(), persistent=False)
        # Index of the r-th member within a byte.
        self.register_buffer("_rank_in", byte.sort(dim=-1, descending=True, stable=True).indices, persistent=False)
        self.register_buffer("_size_of", byte.sum(-1).to(torch.int16), persistent=False)
        self.register_buffer("clues", self._clue_sets(letters), persistent=False)
        self._anything, self._nothing = self.clues.shape[0] - 2, self.clues.shape[0] - 1

    def all(self, n: int) -> Tensor:
        """``n`` sets of all words, uint8 ``[n, C]`` with eight words per byte."""
        return self.clues[self._anything].expand(n, -1)

    @staticmethod
    def pack(members: Tensor) -> Tensor:
        """Pack members, bool ``[..., W]``, into sets, uint8 ``[..., C]``."""
        spare = -members.shape[-1] % 8
        bits = torch.nn.functional.pad(members.to(torch.uint8), (0, spare)).unflatten(-1, (-1, 8))
        place = torch.arange(8, dtype=torch.uint8, device=members.device)
        return (bits << place).sum(-1, dtype=torch.uint8)

    def members(self, sets: Tensor) -> Tensor:
        """Unpack sets, uint8 ``[..., C]``, into members, bool ``[..., W]``."""
        members = torch.empty((*sets.shape[:-1], self.n_words), dtype=torch.bool, device=sets.device)
        # On a CPU index_select is six times as fast as indexing, and this many sets fit its cache.
        some_sets, some_members = sets.reshape(-1, sets.shape[-1]).split(256), members.view(-1, self.n_words).split(256)
        for some, out in zip(some_sets, some_members, strict=True):
            eight = self._members_of.index_select(0, some.to(torch.int32).flatten())
            out.copy_(eight.view(torch.bool).view(-1, 8 * some.shape[1])[:, : self.n_words])
        return members

    def size(self, sets: Tensor) -> Tensor:
        """Number of words in each set, int64 ``[...]``."""
        return self._size_of[sets.to(torch.int32)].sum(-1)

    def pick(self, sets: Tensor, rank: Tensor) -> Tensor:
        """The word with ``rank`` words before it in its set, int64 ``[...]``; ``rank`` must be below the size."""
        upto = self._size_of[sets.to(torch.int32)].cumsum(-1)
        byte = (upto <= rank[..., None]).sum(-1, keepdim=True).clamp_max(sets.shape[-1] - 1)
        content = sets.gather(-1, byte)[..., 0].to(torch.int64)
        before = upto.gather(-1, byte)[..., 0] - self._size_of[content]
        return byte[..., 0] * 8 + self._rank_in[content, (rank - before).clamp(0, 7)]

    def filter(self, sets: Tensor, guess: Tensor, colours: Tensor, heard: Tensor | None = None) -> Tensor:
        """Remove the words for which ``guess`` would not get ``colours``.

        Args:
            sets: uint8 ``[N, C]``.
            guess: int64 letters ``[N, 5]``; any tokens where ``heard`` is False.
            colours: int64 ``[N, 5]``: 0 black, 1 yellow, 2 green.
            heard: bool ``[N]``: False for sets that are not filtered; default all True.

        Returns:
            uint8 ``[N, C]``; empty sets if the rules cannot give such colours.
        """
        # By place, in long rows, which the processor handles faster.
        letter, colour = (entry.T.to(torch.int32, memory_format=torch.contiguous_format) for entry in (guess, colours))
        same = letter[:, None] == letter  # [5, 5, N]
        black = colour == BLACK
        if self.rules == "ilql":
            times, exact = ~black, black
        else:
            times = (same & ~black).sum(1, dtype=torch.uint8)
            exact = (same & black).sum(1, dtype=torch.uint8) > 0
        clue = _clue_number(letter, colour == GREEN, times, exact)
        if self.rules == "official":
            # Of equal letters the left ones become yellow first.
            later = torch.ones_like(same[..., 0]).triu(1)[..., None]
            wrong = same & later & black[:, None] & (colour == YELLOW)
            clue = torch.where(wrong.flatten(0, 1).sum(0, dtype=torch.uint8) > 0, self._nothing, clue)
        if heard is not None:
            clue = torch.where(heard, clue, self._anything)
        first, *others = clue.unbind(0)
        narrowed = self.clues.index_select(0, first)
        narrowed &= sets
        for number in others:
            narrowed &= self.clues.index_select(0, number)
        return narrowed

    def _clue_sets(self, letters: Tensor) -> Tensor:
        """The set of each clue, uint8 ``[5 * 26 * 2 * 6 * 2 + 2, C]``, in the order of :func:`_clue_number`.

        The last two clues agree with all words and with none.
        """
        alphabet = torch.arange(len(LETTERS), device=letters.device)
        here = letters.T[:, None, :] == alphabet[:, None]  # [5, 26, W]
        times = here.sum(0)  # [26, W]
        seen = torch.arange(_SEEN, device=letters.device)[:, None]
        count = torch.stack([times[:, None] >= seen, times[:, None] == seen], 2)  # [26, 6, 2, W]
        place = torch.stack([~here, here], 2)  # [5, 26, 2, W]
        both = self.pack(place)[:, :, :, None, None] & self.pack(count)[None, :, None]
        all_words = self.pack(torch.ones((1, self.n_words), dtype=torch.bool, device=letters.device))
        return torch.cat([both.flatten(0, 4), all_words, torch.zeros_like(all_words)])


def _clue_number(letter: Tensor, here: Tensor, times: Tensor, exact: Tensor) -> Tensor:
    """Number of the clue at each place, int32 ``[5, N]``."""
    place = torch.arange(WORD_LENGTH, dtype=torch.int32, device=letter.device)[:, None]
    return (((place * len(LETTERS) + letter) * 2 + here) * _SEEN + times) * 2 + exact
