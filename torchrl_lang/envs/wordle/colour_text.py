"""Colours of guesses as text: tile emoji, letters, and the tokenizer's symbols."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang.envs.wordle.rules import BLACK, GREEN, YELLOW, colours_of_codes

__all__ = [
    "CODE_OF_LETTERS",
    "CODE_OF_SYMBOLS",
    "LETTERS_OF_CODE",
    "SYMBOLS_OF_CODE",
    "TILE_COLOURS",
    "code_of",
    "tile_colours",
]

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

LETTERS_OF_CODE = ["".join("byg"[colour] for colour in colours) for colours in colours_of_codes().tolist()]
"""Five letters for the colours of each of the 243 codes, such as ``bybbg``."""
SYMBOLS_OF_CODE = ["".join(f"<{letter}>" for letter in letters) for letters in LETTERS_OF_CODE]
"""The tokenizer's symbols for them, such as ``<b><y><b><b><g>``."""
CODE_OF_LETTERS = {letters: code for code, letters in enumerate(LETTERS_OF_CODE)}
CODE_OF_SYMBOLS = {symbols: code for code, symbols in enumerate(SYMBOLS_OF_CODE)}


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
