"""The tokenizer protocol, and a tokenizer for alphabets of a few symbols."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torchrl_lang._files import FileError, Record, json_digest, shorten, validate
from torchrl_lang.schema import ControlTokens

T = TypeVar("T")

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""The symbol for all characters that are not in an alphabet."""


@runtime_checkable
class Tokenizer(Protocol):
    """The protocol of tokenizers for environments and datasets; TorchRL's ``Tokenizer`` is a transform of strings.

    ``encode`` takes plain text and never encodes a control token's name as that token. ``decode`` of ``encode`` returns
    the text.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids, control tokens included."""

    @property
    def control(self) -> ControlTokens:
        """Ids of the control tokens, with ``vocab_size``; policies generate ids below it."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens are written by name."""

    def config(self) -> dict[str, Any]:
        """The configuration as JSON, from which the tokenizer can be built again."""


class CharTokenizer:
    """Tokenizer over a fixed alphabet of symbols, each one or more characters long.

    Text is encoded from left to right, with the longest matching symbol.

    With ``unknown`` text is normalized first (Unicode's NFC; line breaks CR LF and CR become LF), and the unknown
    symbol, U+FFFD, stands for every character that is not a symbol. The agent cannot write it: policies never generate
    it, and :meth:`encode_action` refuses such a character.

    Args:
        symbols: all symbols in the order of their ids, control tokens included.
        control: names of the six control tokens by field of :class:`~torchrl_lang.schema.ControlTokens`; each must be
            among ``symbols``.
        unknown: U+FFFD is among ``symbols`` and stands for all other characters.

    Raises:
        ValueError: symbols repeat, or a control token or the unknown symbol is missing; on :meth:`encode` without
            ``unknown``, a character is not a symbol.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> tokenizer.encode("cab")
        [2, 0, 1]
        >>> tokenizer.decode([2, 0, 1, tokenizer.control.end_of_action])
        'cab</a>'
        >>> tokenizer.encode("a dog")
        Traceback (most recent call last):
            ...
        ValueError: ' ' at position 1 of 'a dog' is not in this tokenizer's alphabet 'abc'.
        >>> tokenizer = CharTokenizer.from_texts(["abc"])
        >>> tokenizer.decode(tokenizer.encode("a cab"))
        'a�cab'
    """

    vocab_size: int
    """Number of token ids, control tokens included."""
    control: ControlTokens
    """Ids of the control tokens; ``forbidden`` has the unknown symbol."""
    DEFAULT_CONTROL = {
        "pad": "<|pad|>",
        "end_of_action": "</a>",
        "end_of_state": "</s>",
        "begin_state": "<s>",
        "begin_action": "<a>",
        "end_of_dialogue": "</eod>",
    }

    def __init__(self, symbols: Sequence[str], control: dict[str, str] | None = None, *, unknown: bool = False) -> None:
        self.symbols = tuple(symbols)
        self._control_names = dict(self.DEFAULT_CONTROL if control is None else control)
        check_control(self._control_names)
        needed = [*self._control_names.values(), *([UNKNOWN] if unknown else [])]
        missing = [name for name in needed if name not in self.symbols]
        if missing or any(len(set(names)) != len(names) for names in (self.symbols, needed)) or "" in self.symbols:
            found = f"{missing} are missing" if missing else "some are empty or repeated"
            raise ValueError(f"The symbols must differ and include the control tokens and the unknown symbol: {found}.")
        self._id = {symbol: index for index, symbol in enumerate(self.symbols)}
        self.unknown: int | None = self._id[UNKNOWN] if unknown else None
        """Id of the unknown symbol, if there is one."""
        ids: dict[str, Any] = {field: self._id[name] for field, name in self._control_names.items()}
        self.vocab_size = len(self.symbols)
        forbidden = () if self.unknown is None else (self.unknown,)
        self.control = ControlTokens(**ids, vocab_size=self.vocab_size, forbidden=forbidden)
        special = {*self.control.ids(), *forbidden}
        plain = [symbol for symbol in self.symbols if self._id[symbol] not in special]
        self._alphabet = ("" if all(len(symbol) == 1 for symbol in plain) else " ").join(plain)
        self._plain = {symbol: self._id[symbol] for symbol in plain}
        self._pattern = re.compile("|".join([*map(re.escape, sorted(plain, key=len, reverse=True)), r"[\s\S]"]))

    @classmethod
    def from_alphabet(cls, alphabet: Sequence[str], *, unknown: bool = False) -> CharTokenizer:
        """A tokenizer over ``alphabet`` with the default control tokens appended, after the unknown symbol if any."""
        return cls([*alphabet, *([UNKNOWN] if unknown else []), *cls.DEFAULT_CONTROL.values()], unknown=unknown)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        """A tokenizer over the characters of some texts, with the unknown symbol for all others."""
        return cls.from_alphabet(sorted(set[str]().union(*map(characters, texts))), unknown=True)

    def encode(self, text: str) -> list[int]:
        """Encode plain text, with the longest matching symbol."""
        text = text if self.unknown is None else normalized(text)
        pieces = self._pattern.findall(text)
        ids: list[Any] = [self._plain.get(piece, self.unknown) for piece in pieces]
        if None in ids:
            raise self._no_symbol(text, len("".join(pieces[: ids.index(None)])))
        return ids

    def encode_action(self, text: str) -> list[int]:
        """Encode an utterance of the agent; raises ``ValueError`` if a character is not a symbol."""
        ids = self.encode(text)
        if self.unknown is not None and self.unknown in ids:
            raise self._no_symbol(normalized(text), len(self.decode(ids[: ids.index(self.unknown)])))
        return ids

    def _no_symbol(self, text: str, position: int) -> ValueError:
        found = f"{text[position]!r} at position {position} of {shorten(text)}"
        return ValueError(f"{found} is not in this tokenizer's alphabet {shorten(self._alphabet)}.")

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens are written by name."""
        return "".join(self.symbols[int(index)] for index in ids)

    def config(self) -> dict[str, Any]:
        """The symbols and control tokens as JSON."""
        unknown = {} if self.unknown is None else {"unknown": True}
        return {"kind": "char", "symbols": list(self.symbols), "control": dict(self._control_names), **unknown}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CharTokenizer:
        """Build the tokenizer from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        read = validate(CharConfig, config, CONFIG)
        return cls(read.symbols, read.control, unknown=read.unknown)


def normalized(text: str) -> str:
    r"""Text in Unicode's NFC, with the line breaks CR LF and CR as LF.

    Examples:
        >>> from torchrl_lang.text.tokenizers import normalized
        >>> normalized("caf\N{LATIN SMALL LETTER E}\N{COMBINING ACUTE ACCENT}\r\n") == "caf\xe9\n"
        True
    """
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


def characters(text: str) -> set[str]:
    """The characters of a normalized text, without the unknown symbol and halves of surrogate pairs."""
    return {c for c in set(normalized(text)) if c != UNKNOWN and not "\ud800" <= c <= "\udfff"}


def encodes_to(encode: Callable[[T], list[int]], content: T, ids: Sequence[int]) -> bool:
    """Whether a text encodes to these ids; False if it cannot be encoded, such as one with a control token's name."""
    try:
        return encode(content) == list(ids)
    except ValueError:
        return False


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
        remedy = "give a tokenizer that can, as `--tokenizer NAME`"
        raise FileError(path, f"has a text that cannot be encoded ({error}): {last}", remedy) from error
    return longest


def fingerprint(tokenizer: Tokenizer) -> str:
    """A short hash of a tokenizer's configuration; equal for tokenizers that encode alike."""
    return config_fingerprint(tokenizer.config())


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """The :func:`fingerprint` of the tokenizer with this configuration."""
    return json_digest(config)[:16]


def check_control(names: Mapping[str, str]) -> None:
    """Raise ValueError unless exactly the six control tokens have names."""
    if names.keys() != CharTokenizer.DEFAULT_CONTROL.keys():
        raise ValueError(f"A tokenizer has the control tokens {[*CharTokenizer.DEFAULT_CONTROL]}, got {[*names]}.")


CONFIG = "the tokenizer's configuration"
"""How errors call it."""


class CharConfig(Record):
    """The configuration of a :class:`CharTokenizer`."""

    kind: str
    symbols: list[str]
    control: dict[str, str]
    unknown: bool = False


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
    symbols, known, found, count = list(symbols), set[str](), set[str](), Counter[str]()
    for text in texts:
        found.update(text)
        known |= characters(text)
        count.update(_PIECE.findall(text))
    words = sorted(piece for piece, times in count.items() if times >= min_count and piece.isascii())
    unknown = unknown or not found.issubset({*PLAIN, *symbols})
    further = sorted(known) if unknown else []
    return CharTokenizer.from_alphabet(list(dict.fromkeys([*PLAIN, *words, *symbols, *further])), unknown=unknown)
