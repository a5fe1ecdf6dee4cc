"""Build a tokenizer of any kind from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchrl_lang._files import shorten
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.hf_tokenizer import HFTokenizer
from torchrl_lang.text.tokenizers import CharTokenizer, Tokenizer

__all__ = ["KINDS", "tokenizer_from_config"]

KINDS: Mapping[str, Callable[[Mapping[str, Any]], Tokenizer]] = {
    "char": CharTokenizer.from_config,
    "chat": ChatTokenizer.from_config,
    "huggingface": HFTokenizer.from_config,
}
"""Functions that build a tokenizer, by the ``kind`` in its configuration."""


def tokenizer_from_config(config: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from its ``config()``.

    Raises:
        ValueError: the configuration is damaged or its kind is unknown.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, tokenizer_from_config
        >>> config = CharTokenizer.from_alphabet("abc").config()
        >>> tokenizer_from_config(config).encode("cab")
        [2, 0, 1]
    """
    kind = config.get("kind")
    build = KINDS.get(str(kind))
    if build is None:
        raise ValueError(
            f"Unknown kind of tokenizer {shorten(kind)}, expected one of {sorted(KINDS)}: build a custom "
            f"tokenizer yourself and pass it."
        )
    try:
        return build(config)
    except ValueError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f"The configuration of a tokenizer of kind {kind!r} is damaged ({type(error).__name__}: "
            f"{shorten(str(error))}): write it again from the tokenizer."
        ) from error
