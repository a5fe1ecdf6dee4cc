"""Tokenizers as those of transformers: a folder with a model and its tokenizer is read without this library."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lang.data.hf_tokenizer import HFTokenizer
from torchrl_lang.data.tokenizer_config import KINDS, tokenizer_from_config
from torchrl_lang.data.tokenizers import CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

__all__ = ["transformers_tokenizer", "write_tokenizer"]


def transformers_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers that gives the same ids and the same texts.

    What ``transformers`` alone makes of a text:

    - ``tokenizer(text)["input_ids"]`` are the ids of our ``encode``. Nothing is put around a text, and the name of a
      control token in it is plain text (``split_special_tokens``).
    - ``tokenizer(text, split_special_tokens=False)`` reads such names as control tokens, so that it reads what
      ``decode`` wrote of a whole row. Give it no text that somebody else wrote.
    - A text that a :class:`CharTokenizer` has no symbols for is an error there, too.
    - ``pad_token`` is our ``pad``; ``eos_token`` is our ``end_of_action``, where an utterance ends. A chat template of
      the original tokenizer is left out, since rows are not made by it.

    Raises:
        TypeError: the tokenizer is of a kind of the user's own.

    Examples:
        >>> from torchrl_lang.data import CharTokenizer, transformers_tokenizer
        >>> tokenizer = transformers_tokenizer(CharTokenizer.from_alphabet(["a", "b", "ab", "<", "/", ">"]))
        >>> tokenizer("abba</a>")["input_ids"]
        [2, 1, 0, 3, 4, 0, 5]
        >>> tokenizer("abba</a>", split_special_tokens=False)["input_ids"]
        [2, 1, 0, 7]
    """
    from transformers import PreTrainedTokenizerFast  # here, because importing it takes a second or two

    if not isinstance(tokenizer, CharTokenizer | HFTokenizer):
        raise TypeError(
            f"A {type(tokenizer).__name__} has no form in transformers: only CharTokenizer and HFTokenizer."
        )
    backend = _char_backend(tokenizer) if isinstance(tokenizer, CharTokenizer) else _plain_backend(tokenizer)
    control = tokenizer.control
    names = {field: backend.id_to_token(getattr(control, field)) for field in CharTokenizer.DEFAULT_CONTROL}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=names["pad"],
        eos_token=names["end_of_action"],
        additional_special_tokens=list(names.values()),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def write_tokenizer(config: Mapping[str, Any], folder: str | Path) -> None:
    """Write a tokenizer into the folder of a model, as ``AutoTokenizer`` reads it.

    ``generate`` of a model that is loaded from there writes one utterance: ``generation_config.json`` takes over where
    it ends, and the control tokens that it may not contain.

    Args:
        config: ``tokenizer.config()``. One of a kind of the user's own is not written, with a warning.
        folder: holds the model's ``config.json``.
    """
    folder = Path(folder)
    if config.get("kind") not in KINDS:
        warnings.warn(
            f"A tokenizer of kind {config.get('kind')!r} has no form in transformers: the folder gets none that "
            "AutoTokenizer reads.",
            stacklevel=3,
        )
        return
    tokenizer = tokenizer_from_config(config)
    written = transformers_tokenizer(tokenizer)
    written.save_pretrained(folder)
    if not _is_read_alike(written, folder):
        # For some types of models AutoTokenizer builds their own kind of tokenizer from any vocabulary, whatever class
        # the folder names, unless it names code of its own. There is none, and it is not asked for.
        path = folder / "tokenizer_config.json"
        content = json.loads(path.read_text(encoding="utf-8")) | {"auto_map": {"AutoTokenizer": [None, None]}}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if not _is_read_alike(written, folder):
            warnings.warn(
                "AutoTokenizer does not read this tokenizer beside a model of this type: load it from the folder with "
                "transformers.PreTrainedTokenizerFast.",
                stacklevel=3,
            )
    path = folder / "generation_config.json"
    if path.exists():
        control = tokenizer.control
        utterance = {
            "eos_token_id": control.end_of_action,
            "pad_token_id": control.pad,
            "suppress_tokens": list(control.forbidden_in_action()),
        }
        content = json.loads(path.read_text(encoding="utf-8")) | utterance
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_read_alike(tokenizer: PreTrainedTokenizerFast, folder: Path) -> bool:
    """Whether ``AutoTokenizer`` reads the tokenizer that was written to ``folder``."""
    from transformers import AutoTokenizer

    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # of another class, which the files do not fit
        return False
    backend = getattr(read, "backend_tokenizer", None)
    return backend is not None and backend.to_str() == tokenizer.backend_tokenizer.to_str()


def _char_backend(tokenizer: CharTokenizer) -> Backend:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    control = [tokenizer.symbols[index] for index in tokenizer.control.ids()]
    plain = sorted((symbol for symbol in tokenizer.symbols if symbol not in control), key=len, reverse=True)
    backend = Backend(models.WordLevel({symbol: index for index, symbol in enumerate(tokenizer.symbols)}))
    # The first alternative that fits is taken, so the longest symbol. A character of none is a piece of its own, which
    # no word of the vocabulary equals, and therefore an error.
    pattern = "|".join([*map(re.escape, plain), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    # A control token of one character would be such a word: in a plain text it is replaced by what is none.
    single = [name for name in control if len(name) == 1 and not any(name in symbol for symbol in plain)]
    if single:
        backend.normalizer = normalizers.Sequence([normalizers.Replace(name, "\ufffe\ufffe") for name in single])
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return backend


def _plain_backend(tokenizer: HFTokenizer) -> Backend:
    """The tokenizer's own backend, without what it would put around a text."""
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(json.dumps(json.loads(tokenizer.backend.to_str()) | {"post_processor": None}))
