"""Wordle's alphabet: letters, coloured squares, control tokens."""

from __future__ import annotations

from torchrl_lang.data.tokenizers import CharTokenizer
from torchrl_lang.envs.wordle.words import LETTERS

__all__ = ["wordle_tokenizer"]

_CONTROL = ("<|pad|>", "</a>", "</s>", "<s>", "<a>", "</eod>")


def wordle_tokenizer() -> CharTokenizer:
    """The tokenizer of Wordle, with the 35 symbols and ids of the ILQL paper's code (arXiv 2206.11871).

    The letters are 0 to 25; a green, black and yellow square are ``<g>`` 26, ``<b>`` 27 and ``<y>`` 28; the control
    tokens are ``<|pad|>`` 29, ``</a>`` 30, ``</s>`` 31, ``<s>`` 32, ``<a>`` 33 and ``</eod>`` 34.

    Examples:
        >>> from torchrl_lang.envs.wordle import wordle_tokenizer
        >>> tokenizer = wordle_tokenizer()
        >>> tokenizer.vocab_size, tokenizer.encode("abide<g><b><y>")
        (35, [0, 1, 8, 3, 4, 26, 27, 28])
    """
    return CharTokenizer([*LETTERS, "<g>", "<b>", "<y>", *_CONTROL])
