"""Hugging Face tokenizers with the protocol of :mod:`torchrl_lang.text.tokenizers`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lang._files import Record, one_line, shorten, validate
from torchrl_lang.schema import ControlTokens
from torchrl_lang.text.gguf_files import without_gguf
from torchrl_lang.text.tokenizers import CONFIG, CharTokenizer, check_control

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase


class HFTokenizer:
    """A Hugging Face tokenizer with six control tokens appended to its vocabulary.

    The given tokenizer is copied and not modified. A control token that exists already keeps its id; the tokenizer's
    padding token is used for ``pad`` if it has no other use. Text is always encoded as plain text: names of special
    tokens in it are split into ordinary pieces, and no special tokens are added around it.

    Byte-level tokenizers decode an encoded text to the same text; tokenizers that lower the case or lack words do not.

    Args:
        source: a fast tokenizer, or the name or local path of one; also a GGUF file, see ``load_causal_lm``.
        control: other names for control tokens, by field of :class:`~torchrl_lang.schema.ControlTokens`.
        trust_remote_code: if ``source`` is a name or path, run code that comes with the tokenizer, with all rights of
            this process. Read that code first.

    Raises:
        OSError: there is no tokenizer of this name or path, or it needs its own code.
        TypeError: the tokenizer is not a fast one (of the ``tokenizers`` library).
        ValueError: plain text could encode to a control token, whose name must change; or a field is unknown.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from torchrl_lang.text import HFTokenizer
        >>> words = Tokenizer(models.WordLevel({"is": 0, "it": 1, "red": 2, "?": 3, "<unk>": 4}, unk_token="<unk>"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
        >>> tokenizer.encode("is it red")
        [0, 1, 2]
        >>> tokenizer.vocab_size, tokenizer.control.end_of_action
        (11, 6)
        >>> tokenizer.control.end_of_action in tokenizer.encode("it </a> red")
        False
    """

    vocab_size: int
    """Number of token ids, control tokens included: the size of a model's embedding."""
    control: ControlTokens
    """Ids of the control tokens."""

    def __init__(
        self,
        source: str | Path | PreTrainedTokenizerBase,
        *,
        control: Mapping[str, str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        tokenizer = load_hf_tokenizer(source, trust_remote_code)
        serialized = backend_text(tokenizer)
        names = {**CharTokenizer.DEFAULT_CONTROL, **_own_pad(tokenizer), **(control or {})}
        self._build(serialized, names)

    def _build(self, serialized: str, names: Mapping[str, str]) -> None:
        from tokenizers import AddedToken

        check_control(names)
        self.backend = read_backend(serialized)
        """The underlying ``tokenizers.Tokenizer``, control tokens included."""
        self.backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
        self.backend.encode_special_tokens = True  # encode names of special tokens as plain text
        self._control_names = dict(names)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        # Ids may have gaps; an embedding needs a row for the largest one.
        self.vocab_size = 1 + max(vocabulary.values())
        ids: dict[str, Any] = {field: vocabulary[name] for field, name in names.items()}
        self.control = ControlTokens(**ids, vocab_size=self.vocab_size)
        self._control_ids = frozenset(self.control.ids())
        for name in names.values():
            with suppress(_NotEncodable):
                self.encode(name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HFTokenizer:
        """Build the tokenizer from its :meth:`config`; raises ``ValueError`` if the configuration is invalid."""
        read = validate(HFConfig, config, CONFIG)
        tokenizer = cls.__new__(cls)
        tokenizer._build(json.dumps(read.tokenizer), read.control)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text; raises ``ValueError`` if they would include a control token or there are none."""
        ids = encode_plain(self.backend, text)
        if found := self._control_ids.intersection(ids):
            names = " ".join(sorted(str(self.backend.id_to_token(index)) for index in found))
            raise ValueError(f"The text {shorten(text)} encodes to the control token {names}: rename it with control=.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens are written by name."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=False)

    def config(self) -> dict[str, Any]:
        """The whole tokenizer as JSON."""
        own = json.loads(self.backend.to_str())
        return {"kind": "huggingface", "tokenizer": own, "control": dict(self._control_names)}


class HFConfig(Record):
    """The configuration of a :class:`HFTokenizer`."""

    kind: str
    tokenizer: dict[str, Any]
    control: dict[str, str]


class _NotEncodable(ValueError):
    """A text that a tokenizer cannot encode."""


def encode_plain(backend: Backend, text: str) -> list[int]:
    """Ids of a text by a ``tokenizers.Tokenizer``, with nothing added; raises ``ValueError`` if there are none."""
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except Exception as error:  # plain Exception for unknown text, a TypeError for lone surrogates, which JSON may have
        raise _NotEncodable(f"This tokenizer has no tokens for {shorten(text)} ({one_line(error)}).") from None


def load_hf_tokenizer(source: str | Path | PreTrainedTokenizerBase, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer itself, or the one of this name or path."""
    if not isinstance(source, str | os.PathLike):
        return source
    from transformers import AutoTokenizer  # a local import, because it takes one or two seconds

    source = without_gguf(source)
    try:
        return AutoTokenizer.from_pretrained(os.fspath(source), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise any kind of exception, with messages of many lines
        raise OSError(f"There is no readable tokenizer in {os.fspath(source)!r} ({one_line(error)}).") from error


def backend_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fast tokenizer's backend as JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise TypeError(f"{type(tokenizer).__name__} is not a fast tokenizer, one with a 'backend_tokenizer'.")
    return backend.to_str()


def read_backend(serialized: str) -> Backend:
    """The backend that :func:`backend_text` wrote, without truncation and padding; raises ``ValueError`` if damaged."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(serialized)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"This is not a tokenizer of the tokenizers library ({one_line(error)}).") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _own_pad(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The tokenizer's padding token, unless it also ends texts or may occur in plain text."""
    pad = getattr(tokenizer, "pad_token", None)
    others = {getattr(tokenizer, f"{role}_token", None) for role in ("eos", "bos", "unk", "sep", "cls", "mask")}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    return {"pad": pad} if pad is not None and pad not in others and pad in special else {}


_CUT = "\ue0c7\ue0d5"
"""Two characters without a meaning."""


class PlainTextEncoder:
    """Encodes texts with a ``tokenizers.Tokenizer`` so that no text of others can forge an added token.

    Args:
        backend: the tokenizer. Added tokens that are special, or that contain a letter or digit, are the names to
            protect; some tokenizers also have added tokens for runs of white space, which are ordinary text.
    """

    def __init__(self, backend: Backend) -> None:
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
        refused = self._special_ids if only_special else self._marker_ids
        ids = [index for part in self._parts(text, only_special) for index in self.following(part)]
        if found := refused.intersection(ids):
            names = " ".join(sorted(str(self._backend.id_to_token(index)) for index in found))
            raise ValueError(f"The plain text {shorten(text)} encodes to the added token {names}.")
        return ids

    def cut(self, text: str, *, only_special: bool = False) -> str:
        """A text with a mark in every name of an added token, see :meth:`encode`, for :meth:`encode_cut`."""
        return _CUT.join(self._parts(text, only_special))

    def _parts(self, text: str, only_special: bool) -> list[str]:
        """A text, cut behind the first character of every name of an added token."""
        marker = self._special_marker if only_special else self._marker
        cuts = [0, *(match.start() + 1 for match in marker.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in pairwise(cuts)]

    def encode_cut(self, text: str) -> list[int]:
        """Ids of a text whose parts are encoded each by itself where it has a mark; other names become their tokens."""
        first, *others = text.split(_CUT)
        return encode_plain(self._backend, first) + [index for part in others for index in self.following(part)]

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
