"""Colours of guesses as text: tile emoji, letters, and the tokenizer's symbols."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang.envs.wordle.rules import BLACK, GREEN, YELLOW
from torchrl_lang.envs.wordle.words import WORD_LENGTH

__all__ = ["TILE_COLOURS", "symbols_of_code", "tile_colours"]

TILE_COLOURS = {
    "⬛": BLACK,
    "⬜": BLACK,
    "🟨": YELLOW,
    "🟦": YELLOW,
    "🟩": GREEN,
    "🟧": GREEN,
}
"""Tiles of the dark and the light theme, and blue and orange for high contrast."""

_VARIATION = "\N{VARIATION SELECTOR-16}"  # may follow an emoji and changes nothing
_SYMBOLS = ("<b>", "<y>", "<g>")


def tile_colours(text: str) -> list[int] | None:
    """The colours of a line that consists of tiles only, of any number; None for other lines.

    Examples:
        >>> from torchrl_lang.envs.wordle.colour_text import tile_colours
        >>> tile_colours("⬛🟨🟦🟩🟧 "), tile_colours("solved 🟩")
        ([0, 1, 1, 2, 2], None)
    """
    text = text.replace(_VARIATION, "").strip()
    if not text or any(character not in TILE_COLOURS for character in text):
        return None
    return [TILE_COLOURS[character] for character in text]


def code_of(colours: Sequence[int]) -> int:
    """Five colours as one number in base 3, see :func:`~torchrl_lang.envs.wordle.feedback_code`."""
    code = 0
    for colour in colours:
        code = 3 * code + colour
    return code


def symbols_of_code(code: int) -> str:
    """The symbols of five colours, such as ``<b><y><b><b><g>``, from their code."""
    return "".join(_SYMBOLS[code // 3**place % 3] for place in reversed(range(WORD_LENGTH)))


CODE_OF_SYMBOLS = {symbols_of_code(code): code for code in range(3**WORD_LENGTH)}
"""The code of each of the 243 texts of :func:`symbols_of_code`."""
