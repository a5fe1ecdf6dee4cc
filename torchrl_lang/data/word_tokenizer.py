"""A tokenizer of the words of some texts, which spells other words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchrl_lang.data.tokenizers import CharTokenizer

__all__ = ["word_tokenizer"]

_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_PIECE = re.compile(r"[^A-Za-z ][ ]|[ ]?[A-Za-z]+")


def word_tokenizer(texts: Iterable[str], *, min_count: int = 1, symbols: Iterable[str] = ()) -> CharTokenizer:
    """A tokenizer whose symbols are the words of some texts, and all printable ASCII characters for other words.

    A word includes the space before it, and a stop or comma the space after it. So a word has the same ids everywhere
    in a text, and a command has the same ids alone and in a list of commands. All ASCII text can be encoded, and
    ``decode`` of ``encode`` is the same text. The order of the texts does not matter.

    Args:
        texts: texts with the words.
        min_count: rarer words are encoded by their characters.
        symbols: further symbols, such as numbers that are one token each.

    Examples:
        >>> from torchrl_lang.data import word_tokenizer
        >>> tokenizer = word_tokenizer(["You can go east, take coin.", "The coin is here."])
        >>> [tokenizer.symbols[index] for index in tokenizer.encode("take coin")]
        ['take', ' coin']
        >>> tokenizer.decode(tokenizer.encode("take the red coin!"))
        'take the red coin!'
    """
    count: dict[str, int] = {}
    for text in texts:
        for piece in _PIECE.findall(text):
            count[piece] = count.get(piece, 0) + 1
    words = sorted(piece for piece, times in count.items() if times >= min_count and len(piece) > 1 and piece.isascii())
    return CharTokenizer.from_alphabet(list(dict.fromkeys([*_CHARACTERS, *words, *symbols])))
