"""Encode texts in which the names of added tokens are plain text, beside strings in which they are tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from torchrl_lang._files import shorten
from torchrl_lang.text.hf_tokenizer import encode_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PlainTextEncoder"]


class PlainTextEncoder:
    """Encodes texts with a ``tokenizers.Tokenizer`` so that no text of others can forge an added token.

    Args:
        backend: the tokenizer. Added tokens that are special, or that contain a letter or digit, are the names to
            protect; some tokenizers also have added tokens for runs of white space, which are ordinary text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        names = {token.content: index for index, token in added.items() if token.special}
        self.special: dict[str, int] = names
        """Ids of the special tokens by name."""
        markers = {t.content: i for i, t in added.items() if t.special or any(map(str.isalnum, t.content))}
        self._marker_ids, self._special_ids = frozenset(markers.values()), frozenset(names.values())
        self._marker, self._special_marker = _any_of(markers), _any_of(names)
        # A token that keeps the white space beside it, to encode a text as if it were not the first one.
        self._anchor = next((t.content for t in added.values() if t.special and not (t.lstrip or t.rstrip)), "")

    def encode(self, text: str, *, only_special: bool = False) -> list[int]:
        """Ids of a text as if it followed other text, with every name of an added token cut in two.

        Args:
            text: plain text.
            only_special: names of added tokens that are not special become these tokens.

        Raises:
            ValueError: the text still encodes to an added token.
        """
        marker = self._special_marker if only_special else self._marker
        refused = self._special_ids if only_special else self._marker_ids
        ids, start = [], 0
        for match in marker.finditer(text):
            ids += self.following(text[start : match.start() + 1])
            start = match.start() + 1
        ids += self.following(text[start:])
        found = refused.intersection(ids)
        if found:
            names = sorted(str(self._backend.id_to_token(index)) for index in found)
            raise ValueError(f"The plain text {shorten(text)} encodes to the added token {' '.join(names)}.")
        return ids

    def following(self, text: str) -> list[int]:
        """Ids of a text as if it followed other text; names of added tokens become these tokens."""
        return encode_plain(self._backend, self._anchor + text)[bool(self._anchor) :]

    def interleave(self, strings: Sequence[str], texts: Sequence[str]) -> list[int]:
        """Ids of ``strings[0] + texts[0] + strings[1] + ...``, one string more than texts.

        Names of added tokens are tokens in the strings and plain text in the texts. Everything is encoded in one call
        where no text contains a name.
        """
        whole = "".join(string + text for string, text in zip_longest(strings, texts, fillvalue=""))
        found = self._marker.findall
        if found(whole) == [name for string in strings for name in found(string)]:
            return encode_plain(self._backend, whole)
        ids: list[int] = []
        plain = ""
        for index, (string, text) in enumerate(zip_longest(strings, texts, fillvalue="")):
            names = list(self._marker.finditer(string))
            if not names:
                plain += string + text
                continue
            # What stands around the names of the outermost strings is encoded with them.
            begin = 0 if index == 0 else names[0].start()
            end = len(string) if index == len(texts) else names[-1].end()
            ids += self.encode(plain + string[:begin]) + encode_plain(self._backend, string[begin:end])
            plain = string[end:] + text
        return ids + self.encode(plain)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of some names."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
