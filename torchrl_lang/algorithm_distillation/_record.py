"""Typed records of JSON files (until they stand in _files)."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrl_lang._files import FileError, json_digest, read_json


class Record(BaseModel):
    """A record on disk."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


R = TypeVar("R", bound=Record)


def read_record(path: Path, kind: type[R], *, remedy: str) -> R:
    """Read a manifest."""
    content = read_json(path, remedy=remedy)
    if content.pop("digest", None) != json_digest(content):
        raise FileError(path, "was changed after it was written", remedy)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileError(path, f'has a bad "{where}": {first["msg"]}', remedy) from error
