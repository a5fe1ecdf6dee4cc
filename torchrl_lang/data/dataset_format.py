"""What a data set's folder holds: names, types, and how its JSON is read and written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED

__all__ = [
    "DISK_DTYPES",
    "FORMAT",
    "MANIFEST",
    "ROWS",
    "TOKENIZER",
    "VERSION",
    "partial_folder",
    "read_json",
    "replace_folder",
    "write_json",
]

FORMAT, VERSION = "torchrl_lang rows", 1
MANIFEST, TOKENIZER, ROWS = "manifest.json", "tokenizer.json", "rows"

DISK_DTYPES = {
    TOKENS: torch.int32,
    ATTENTION_MASK: torch.bool,
    ACTION_MASK: torch.bool,
    TOKEN_REWARD: torch.float32,
    TERMINATED: torch.bool,
    TRUNCATED: torch.bool,
}
"""The entries of a data set and their types on disk."""


def partial_folder(folder: Path) -> Path:
    """Where a data set stands until it is finished."""
    return folder.with_name(f"{folder.name}.partial")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the data set is damaged, make it again.") from None
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error}): the data set is damaged, make it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object: the data set is damaged.")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that a person can read."""
    # Half a surrogate pair in a string is then written as JSON's own escape of it.
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def replace_folder(new: Path, target: Path) -> None:
    """Put ``new`` where ``target`` stands, which is gone only after it is replaced."""
    if not target.exists():
        new.rename(target)
        return
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    new.rename(target)
    shutil.rmtree(old)
