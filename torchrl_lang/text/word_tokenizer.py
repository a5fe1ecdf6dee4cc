"""A tokenizer of the words of some texts, which spells other words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchrl_lang.text.tokenizers import CharTokenizer, characters

__all__ = ["PLAIN", "word_tokenizer"]

PLAIN = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that every tokenizer of words has."""
_PIECE = re.compile(r"[^A-Za-z ][ ]|[ ]?[A-Za-z]+")


def word_tokenizer(
    texts: Iterable[str], *, min_count: int = 1, symbols: Iterable[str] = (), unknown: bool = False
) -> CharTokenizer:
    """A tokenizer whose symbols are the words of some texts, and characters for other words.

    A word has only letters of ASCII. It includes the space before it, and a stop or comma the space after it. So a word
    has the same ids everywhere in a text, and a command has the same ids alone and in a list of commands. The
    characters are those of printable ASCII and the line feed. If the texts have others, all of these are symbols, too,
    and the tokenizer has the unknown symbol of :class:`CharTokenizer` for what was never seen. ``decode`` of ``encode``
    is the same text, with the unknown symbol it is normalized. The order of the texts does not matter.

    Args:
        texts: texts with the words.
        min_count: rarer words are encoded by their characters.
        symbols: further symbols, such as numbers that are one token each.
        unknown: the tokenizer has the unknown symbol in any case.

    Examples:
        >>> from torchrl_lang.text import word_tokenizer
        >>> tokenizer = word_tokenizer(["You can go east, take coin.", "The coin is here."])
        >>> [tokenizer.symbols[index] for index in tokenizer.encode("take coin")]
        ['take', ' coin']
        >>> tokenizer.decode(tokenizer.encode("take the red coin!"))
        'take the red coin!'
    """
    symbols, known, found = list(symbols), set[str](), set[str]()
    count: dict[str, int] = {}
    for text in texts:
        found.update(text)
        known |= characters(text)
        for piece in _PIECE.findall(text):
            count[piece] = count.get(piece, 0) + 1
    words = sorted(piece for piece, times in count.items() if times >= min_count and len(piece) > 1 and piece.isascii())
    unknown = unknown or not found.issubset({*PLAIN, *symbols})
    further = sorted(known) if unknown else []
    return CharTokenizer.from_alphabet(list(dict.fromkeys([*PLAIN, *words, *symbols, *further])), unknown=unknown)
