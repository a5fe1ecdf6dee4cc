"""Wordle's coloured tiles as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchrl_lang.envs.wordle.rules import BLACK, GREEN, YELLOW
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import LETTERS

__all__ = ["letters_line", "tile_line", "use_colour"]

_ANSI = {BLACK: "\x1b[97;100m", YELLOW: "\x1b[30;43m", GREEN: "\x1b[30;42m"}
_PLAIN = {BLACK: " {} ", YELLOW: "({})", GREEN: "[{}]"}


def use_colour() -> bool:
    """Whether to print colours: standard output is a terminal, not a dumb one, and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def tile_line(letters: Sequence[int], colours: Sequence[int], ansi: bool) -> str:
    """A guess, by the numbers of its letters, as a line of tiles."""
    return "".join(_tile(LETTERS[letter], colour, ansi) for letter, colour in zip(letters, colours, strict=True))


def letters_line(turns: Turns, ansi: bool) -> str:
    """The alphabet in one line, each letter that the game of one row has tried in its best colour."""
    best: dict[int, int] = {}
    for turn in range(int(turns.answered[0])):
        for letter, shade in zip(turns.guess[0, turn].tolist(), turns.colours[0, turn].tolist(), strict=True):
            best[letter] = max(shade, best.get(letter, BLACK))
    shown = []
    for number, letter in enumerate(LETTERS.upper()):
        shade = best.get(number)
        if shade == BLACK:
            shown.append(f"\x1b[2m {letter} \x1b[0m" if ansi else " . ")
        else:
            shown.append(f" {letter} " if shade is None else _tile(letter, shade, ansi))
    return "".join(shown)


def _tile(letter: str, colour: int, ansi: bool) -> str:
    return f"{_ANSI[colour]} {letter.upper()} \x1b[0m" if ansi else _PLAIN[colour].format(letter.upper())
