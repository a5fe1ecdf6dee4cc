"""GGUF files, llama.cpp's format of quantized models: converted to a Hugging Face folder at the first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lang._checks import needs_extra
from torchrl_lang._files import file_errors, write_folder

if TYPE_CHECKING:
    import os

_REMEDY = "download it again, or give a model that transformers can read from GGUF"


def without_gguf(source: str | os.PathLike[str]) -> str | Path:
    """The Hugging Face folder of a GGUF file; other names and folders as they are.

    The folder has the file's name without ``.gguf`` and lies beside it. It holds the tokenizer and the weights in
    float32, so it takes four bytes a weight. It is made where it is missing or older than the file, which takes
    transformers some seconds; later calls use it.

    Args:
        source: path of a GGUF file, or any other name or folder of a model.

    Raises:
        FileNotFoundError: there is no such GGUF file.
        ImportError: the package gguf is missing.
        FileError: the file is damaged, or transformers cannot read a model of its kind.

    Examples:
        >>> from torchrl_lang.text.gguf_files import without_gguf
        >>> without_gguf("Qwen/Qwen2.5-0.5B-Instruct")
        'Qwen/Qwen2.5-0.5B-Instruct'
    """
    path = Path(source)
    if path.suffix != ".gguf":
        return source if isinstance(source, str) else path
    if not path.is_file():
        raise FileNotFoundError(f"There is no GGUF file {path}: check the path.")
    folder = path.with_suffix("")
    config = folder / "config.json"
    if not config.exists() or config.stat().st_mtime < path.stat().st_mtime:
        _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    with needs_extra("A GGUF file", "gguf"):
        import gguf  # noqa: F401

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named: Any = {"gguf_file": path.name}
    with file_errors(path, "cannot be read as GGUF", _REMEDY, Exception):  # damaged files raise any kind of exception
        lm = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, trust_remote_code=False, **named)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False, **named)
    # The weights are plain numbers now, but transformers saves no model that it believes to be quantized.
    lm.config.__dict__.pop("quantization_config", None)
    lm.hf_quantizer, lm.is_quantized = None, False
    with write_folder(folder) as new:
        lm.save_pretrained(new)
        tokenizer.save_pretrained(new)
