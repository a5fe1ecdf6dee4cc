"""The rules of Wordle: the colours of a guess, by letter or as one of 243 codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.envs.wordle.words import WORD_LENGTH

__all__ = ["Rules", "feedback", "feedback_code", "feedback_table"]

Rules = Literal["official", "ilql"]

BLACK, YELLOW, GREEN = 0, 1, 2

SOLVED = 3**WORD_LENGTH - 1
"""The code of five green squares."""


def check_rules(rules: str) -> None:
    """Raise ValueError unless ``rules`` names a set of rules."""
    one_of("rules", rules, ("official", "ilql"))


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
    check_rules(rules)
    guess, word = torch.broadcast_tensors(guess, word)
    colours = _colours(_planes(guess), _planes(word), rules)
    return torch.stack(colours, -1).to(torch.int64)


def answer(guess: Tensor, word: Tensor, rules: Rules = "official") -> Tensor:
    """The code of :func:`feedback`, computed directly, uint8 ``[...]``; the arguments are the same."""
    guess, word = torch.broadcast_tensors(guess, word)
    return _code(_colours(_planes(guess), _planes(word), rules))


def colours_of_codes(device: torch.device | None = None) -> Tensor:
    """The five colours of each code, int64 ``[243, 5]``."""
    code = torch.arange(SOLVED + 1, device=device)[:, None]
    return code // 3 ** torch.arange(WORD_LENGTH - 1, -1, -1, device=device) % 3


def feedback_code(colours: Tensor) -> Tensor:
    """Five colours as one number in base 3, the first the most significant: int64 ``[..., 5]`` to ``[...]``."""
    code = colours[..., 0]
    for position in range(1, WORD_LENGTH):
        code = code * 3 + colours[..., position]
    return code


def feedback_table(guesses: Tensor, words: Tensor, rules: Rules = "official") -> Tensor:
    """Compute the code of every guess for every word: letters ``[G, 5]``, ``[W, 5]`` to uint8 ``[G, W]``."""
    check_rules(rules)
    n_guesses, n_words = guesses.shape[0], words.shape[0]
    table = torch.empty((n_guesses, n_words), dtype=torch.uint8, device=guesses.device)
    columns = _planes(words)[:, None, :]
    # This many pairs and their colours fit into the processor's cache.
    step = max(1, 2**15 // max(1, n_words))
    for start in range(0, n_guesses, step):
        chunk = _planes(guesses[start : start + step])[:, :, None]
        table[start : start + step] = _code(_colours(chunk, columns, rules))
    return table


def _code(colours: list[Tensor]) -> Tensor:
    """The code of colours by place, uint8."""
    code, *others = colours
    for colour in others:
        code = torch.add(colour, code, alpha=3)
    return code


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


TILE_COLOURS = {"⬛": BLACK, "⬜": BLACK, "🟨": YELLOW, "🟦": YELLOW, "🟩": GREEN, "🟧": GREEN}
"""Tiles of the dark and the light theme, and blue and orange for high contrast."""

_VARIATION = "\N{VARIATION SELECTOR-16}"  # may follow an emoji and changes nothing

LETTERS_OF_CODE = ["".join("byg"[colour] for colour in colours) for colours in colours_of_codes().tolist()]
"""Five letters for the colours of each of the 243 codes, such as ``bybbg``."""
SYMBOLS_OF_CODE = ["".join(f"<{letter}>" for letter in letters) for letters in LETTERS_OF_CODE]
"""The tokenizer's symbols for them, such as ``<b><y><b><b><g>``."""
CODE_OF_LETTERS = {letters: code for code, letters in enumerate(LETTERS_OF_CODE)}
CODE_OF_SYMBOLS = {symbols: code for code, symbols in enumerate(SYMBOLS_OF_CODE)}


def tile_colours(text: str) -> list[int] | None:
    """The colours of a line that consists of tiles only, of any number; None for other lines."""
    text = text.replace(_VARIATION, "").strip()
    if not text or any(character not in TILE_COLOURS for character in text):
        return None
    return [TILE_COLOURS[character] for character in text]


def code_of(colours: Sequence[int]) -> int:
    """Five colours as one number in base 3, see :func:`feedback_code`."""
    code = 0
    for colour in colours:
        code = 3 * code + colour
    return code
