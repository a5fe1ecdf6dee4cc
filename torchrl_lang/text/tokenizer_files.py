"""Build a tokenizer of any kind from its configuration."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lang._files import shorten
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.hf_tokenizer import HFTokenizer
from torchrl_lang.text.tokenizers import UNKNOWN, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

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
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.text.tokenizer_files import tokenizer_from_config
        >>> config = CharTokenizer.from_alphabet("abc").config()
        >>> tokenizer_from_config(config).encode("cab")
        [2, 0, 1]
    """
    kind = config.get("kind")
    build = KINDS.get(str(kind))
    if build is None:
        raise ValueError(f"Unknown kind of tokenizer {shorten(kind)}, not one of {sorted(KINDS)}: pass your own.")
    return build(config)


def transformers_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Convert a tokenizer to one of transformers that gives the same ids and texts.

    In ``transformers``:

    - ``tokenizer(text)["input_ids"]`` equals our ``encode(text)``: nothing is added around the text, and names of
      control tokens in it are plain text (``split_special_tokens``).
    - ``tokenizer(text, split_special_tokens=False)`` encodes such names as control tokens, so it inverts ``decode`` of
      a whole row. Do not pass untrusted text to it.
    - Text with characters that a :class:`CharTokenizer` lacks is an error there, too, or has its unknown symbol.
    - ``pad_token`` is our ``pad``; ``eos_token`` is our ``end_of_action``, which ends an utterance. A chat template of
      the original tokenizer is removed, because rows do not use it.
    - A :class:`ChatTokenizer` keeps its chat template and its other tokens' roles. The names of its special tokens are
      always encoded as these tokens, because ``apply_chat_template`` relies on that.

    Raises:
        TypeError: the tokenizer is of a custom class.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.text.tokenizer_files import transformers_tokenizer
        >>> tokenizer = transformers_tokenizer(CharTokenizer.from_alphabet(["a", "b", "ab", "<", "/", ">"]))
        >>> tokenizer("abba</a>")["input_ids"]
        [2, 1, 0, 3, 4, 0, 5]
        >>> tokenizer("abba</a>", split_special_tokens=False)["input_ids"]
        [2, 1, 0, 7]
    """
    from transformers import PreTrainedTokenizerFast  # a local import, because it takes one or two seconds

    if not isinstance(tokenizer, CharTokenizer | ChatTokenizer | HFTokenizer):
        raise TypeError(f"{type(tokenizer).__name__} cannot be converted to transformers: its class is custom.")
    backend = _char_backend(tokenizer) if isinstance(tokenizer, CharTokenizer) else _plain_backend(tokenizer)
    control = tokenizer.control
    roles = {"pad_token": backend.id_to_token(control.pad), "eos_token": backend.id_to_token(control.end_of_action)}
    if isinstance(tokenizer, CharTokenizer) and tokenizer.unknown is not None:
        roles["unk_token"] = UNKNOWN
    options: dict[str, Any] = {"split_special_tokens": True}
    if isinstance(tokenizer, ChatTokenizer):
        roles |= tokenizer.roles
        options = {"split_special_tokens": False, "chat_template": tokenizer.row_format.template}
    names = [backend.id_to_token(index) for index in sorted({*control.ids(), *control.forbidden})]
    options |= {"additional_special_tokens": names, "clean_up_tokenization_spaces": False, **roles}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def write_tokenizer(config: Mapping[str, Any], folder: str | Path) -> None:
    """Write a tokenizer into a model's folder so that ``AutoTokenizer`` can load it.

    ``generate`` of a model loaded from this folder writes one utterance: ``generation_config.json`` gets its end token
    and the control tokens that it may not contain.

    Args:
        config: ``tokenizer.config()``. A custom kind is not written, with a warning.
        folder: holds the model's ``config.json``.
    """
    folder = Path(folder)
    if config.get("kind") not in KINDS:
        kind = f"A tokenizer of kind {config.get('kind')!r} cannot be converted to transformers"
        warnings.warn(f"{kind}: AutoTokenizer cannot load it from the folder.", stacklevel=3)
        return
    tokenizer = tokenizer_from_config(config)
    written = transformers_tokenizer(tokenizer)
    written.save_pretrained(folder)
    if not _is_read_alike(written, folder):
        # For some model types AutoTokenizer ignores the tokenizer class in the folder unless the folder names code of
        # its own. There is no such code, and it is not needed.
        _update(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, None]})
        if not _is_read_alike(written, folder):
            what = "AutoTokenizer cannot load this tokenizer for a model of this type"
            warnings.warn(f"{what}: load it from the folder with PreTrainedTokenizerFast.", stacklevel=3)
    path, control = folder / "generation_config.json", tokenizer.control
    if path.exists():
        suppressed = list(control.forbidden_in_action())
        _update(path, eos_token_id=control.end_of_action, pad_token_id=control.pad, suppress_tokens=suppressed)


def _update(path: Path, **entries: Any) -> None:
    """Add entries to a JSON object."""
    content = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_read_alike(tokenizer: PreTrainedTokenizerFast, folder: Path) -> bool:
    """Whether ``AutoTokenizer`` loads an equal tokenizer from ``folder``."""
    from transformers import AutoTokenizer

    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # AutoTokenizer chose another class, which cannot read the files
        return False
    backend = getattr(read, "backend_tokenizer", None)
    return backend is not None and backend.to_str() == tokenizer.backend_tokenizer.to_str()


def _char_backend(tokenizer: CharTokenizer) -> Backend:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    control = [tokenizer.symbols[index] for index in tokenizer.control.ids()]
    plain = sorted((symbol for symbol in tokenizer.symbols if symbol not in control), key=len, reverse=True)
    vocabulary = {symbol: index for index, symbol in enumerate(tokenizer.symbols)}
    has_unknown = tokenizer.unknown is not None
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNKNOWN) if has_unknown else models.WordLevel(vocabulary))
    # A regular expression takes the first alternative that matches, so the longest symbol comes first. A character that
    # is not a symbol becomes a separate piece, which is not in the vocabulary: the unknown symbol, or an error.
    pattern = "|".join([*map(re.escape, plain), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    # A control token of one character would match itself: in plain text, replace it by an unknown one.
    single = [name for name in control if len(name) == 1 and not any(name in symbol for symbol in plain)]
    steps: list[Any] = []
    if has_unknown:  # as ``normalized`` does
        steps = [normalizers.Replace("\r\n", "\n"), normalizers.Replace("\r", "\n"), normalizers.NFC()]
    steps += [normalizers.Replace(name, UNKNOWN if has_unknown else "\ufffe\ufffe") for name in single]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])
    return backend


def _plain_backend(tokenizer: ChatTokenizer | HFTokenizer) -> Backend:
    """The tokenizer's backend without the tokens that it adds around a text."""
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(json.dumps(json.loads(tokenizer.backend.to_str()) | {"post_processor": None}))
