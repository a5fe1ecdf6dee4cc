"""What tasks share: packages that only some need, and the length of their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torchrl_lang._files import FileError
from torchrl_lang.text.tokenizers import Tokenizer


@contextmanager
def needs_extra(what: str, extra: str, other: str = "") -> Iterator[None]:
    """Names the extra to install where an import in the block fails.

    Examples:
        >>> from torchrl_lang.envs.extras import needs_extra
        >>> with needs_extra("OpenEnvGame", "openenv"):
        ...     raise ImportError("No module named 'websockets'")
        Traceback (most recent call last):
            ...
        ImportError: OpenEnvGame needs an extra: pip install 'torchrl-lang[openenv]'.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs an extra: pip install 'torchrl-lang[{extra}]'{other}.") from error


def most_tokens(tokenizer: Tokenizer, path: str | Path, texts: Iterable[tuple[str, str]]) -> int:
    """The largest number of tokens of a file's texts, each given behind its place; 0 for no texts.

    Raises:
        FileError: the tokenizer cannot encode a text.
    """
    encode, longest, last = cache(tokenizer.encode), 0, ""
    try:
        for place, text in texts:
            last = place
            longest = max(longest, len(encode(text)))
    except ValueError as error:
        problem = f"has a text that cannot be encoded ({error}): {last}"
        raise FileError(path, problem, "give a tokenizer that can, as `--tokenizer NAME`") from error
    return longest
