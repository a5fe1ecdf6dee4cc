"""Hugging Face tokenizers behind the protocol of :mod:`torchrl_lang.data.tokenizers`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchrl_lang.data.tokenizers import CharTokenizer, config_fields, read_control
from torchrl_lang.schema import ControlTokens
from torchrl_lang.storage.errors import one_line, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HFTokenizer"]


class HFTokenizer:
    """A Hugging Face tokenizer with the six control tokens added behind its own vocabulary.

    The tokenizer that comes in is copied and left as it was. A control token that it knows already keeps its id; its
    padding token is used for ``pad`` where it serves for nothing else. Text is always read as plain text: what looks
    like a special token in it is cut into ordinary pieces, and nothing is put around it.

    ``decode`` of ``encode`` is the text again as far as the tokenizer allows: byte-level ones keep everything, one that
    lowers the case or knows only some words does not.

    Args:
        source: a fast tokenizer, or a name or local path to load one from.
        control: other names for control tokens, by field of :class:`~torchrl_lang.schema.ControlTokens`.
        trust_remote_code: where ``source`` is a name or a path: run code that comes with the tokenizer, with all rights
            of this process. Read it first.

    Raises:
        OSError: no tokenizer is found under the name or path, or it needs code of its own.
        TypeError: the tokenizer is none of the fast ones (of the ``tokenizers`` library).
        ValueError: plain text could spell a control token, so that its name must change; or a field is unknown.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from torchrl_lang.data import HFTokenizer
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

    def __init__(
        self,
        source: str | os.PathLike[str] | PreTrainedTokenizerBase,
        *,
        control: Mapping[str, str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        tokenizer = _load(source, trust_remote_code) if isinstance(source, str | os.PathLike) else source
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise TypeError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: give one that has a 'backend_tokenizer', such as "
                f"AutoTokenizer loads wherever a tokenizer.json exists."
            )
        names = {**CharTokenizer.DEFAULT_CONTROL, **_own_pad(tokenizer, backend), **(control or {})}
        self._build(backend.to_str(), names)

    def _build(self, serialized: str, names: Mapping[str, str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        unknown = sorted(set(names) - set(CharTokenizer.DEFAULT_CONTROL))
        if unknown:
            raise ValueError(f"Unknown control tokens {unknown}: the fields are {list(CharTokenizer.DEFAULT_CONTROL)}.")
        missing = sorted(set(CharTokenizer.DEFAULT_CONTROL) - set(names))
        if missing:
            raise ValueError(f"The control tokens {missing} are missing: give each a name.")
        try:
            self.backend = Tokenizer.from_str(serialized)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"This is no tokenizer of the tokenizers library ({one_line(error)}).") from error
        """The ``tokenizers.Tokenizer`` that does the work, control tokens included."""
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
        self.backend.encode_special_tokens = True  # the library's word for "special tokens in a text are plain text"
        self._control_names = dict(names)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        # A vocabulary may have holes; a model's embedding needs a row up to the largest id.
        self._vocab_size = 1 + max(vocabulary.values())
        ids = {field: vocabulary[name] for field, name in names.items()}
        self._control = ControlTokens(**ids, vocab_size=self._vocab_size)
        self._control_ids = frozenset(self._control.ids())
        for name in names.values():
            with suppress(_NotEncodable):
                self.encode(name)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HFTokenizer:
        """The tokenizer whose :meth:`config` this is; ``ValueError`` where it is none."""
        fields = config_fields(config)
        serialized, control = fields.take("tokenizer", dict), read_control(fields)
        tokenizer = cls.__new__(cls)
        tokenizer._build(json.dumps(serialized), control)
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids, control tokens included: what a model's embedding is resized to."""
        return self._vocab_size

    @property
    def control(self) -> ControlTokens:
        """Ids of the control tokens."""
        return self._control

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text; ``ValueError`` where its pieces would spell a control token, or there are none."""
        try:
            ids = self.backend.encode(text, add_special_tokens=False).ids
        except TypeError:  # what the library raises for half a surrogate pair, which JSON can bring into a string
            raise _NotEncodable(f"{shorten(text)} is no text that can be written in Unicode.") from None
        except Exception as error:  # the library raises nothing more special where it has no token for unknown text
            raise _NotEncodable(f"This tokenizer has no tokens for {shorten(text)} ({one_line(error)}).") from None
        if not self._control_ids.isdisjoint(ids):
            found = sorted({str(self.backend.id_to_token(index)) for index in self._control_ids.intersection(ids)})
            raise ValueError(
                f"The plain text {shorten(text)} is read as the control token {' '.join(found)}, which is a word of "
                f"this tokenizer's own vocabulary: give the control token another name with control={{field: name}}."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens are written by name."""
        return self.backend.decode([int(index) for index in ids], skip_special_tokens=False)

    def config(self) -> dict[str, Any]:
        """The whole tokenizer as JSON."""
        return {
            "kind": "huggingface",
            "tokenizer": json.loads(self.backend.to_str()),
            "control": dict(self._control_names),
        }


class _NotEncodable(ValueError):
    """A text that a tokenizer has no ids for."""


def _load(source: str | os.PathLike[str], trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # here, because importing it takes a second or two

    try:
        return AutoTokenizer.from_pretrained(os.fspath(source), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files show up as any exception, of many lines
        raise OSError(
            f"There is no tokenizer in {os.fspath(source)!r} that can be read ({one_line(error)})."
        ) from error


def _own_pad(tokenizer: PreTrainedTokenizerBase, backend: Any) -> dict[str, str]:
    """The tokenizer's padding token, unless it also ends texts or is a word that a text may hold."""
    pad = getattr(tokenizer, "pad_token", None)
    others = {getattr(tokenizer, f"{role}_token", None) for role in ("eos", "bos", "unk", "sep", "cls", "mask")}
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    return {"pad": pad} if pad is not None and pad not in others and pad in special else {}
