"""JSON files that contain a digest of their own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_lang.storage.errors import shorten
from torchrl_lang.storage.fields import Fields
from torchrl_lang.storage.folders import write_file

__all__ = ["json_digest", "read_manifest", "write_json", "write_manifest"]

_DIGEST = "digest"


def json_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object as hexadecimal digits, independent of its formatting and of the order of its keys.

    Examples:
        >>> from torchrl_lang.storage.manifests import json_digest
        >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with indentation.

    Raises:
        ValueError: the content is not JSON, for instance it contains NaN.
    """
    _write(path, _plain(path, content))


def write_manifest(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with indentation and a field ``digest`` over all other fields.

    Raises:
        ValueError: the content is not JSON, for instance it contains NaN.
    """
    plain = _plain(path, content)
    _write(path, {**plain, _DIGEST: json_digest(plain)})


def _plain(path: str | Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The object as reading it will return it: keys become strings, tuples become lists."""
    try:
        return json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shorten(dict(content))} cannot be written to {path} as JSON: {error}.") from error


def _write(path: str | Path, content: Mapping[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_manifest(path: str | Path, *, remedy: str, version: int, field: str = "version") -> Fields:
    """Read a file that :func:`write_manifest` wrote.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        version: the latest version that can be read. Files of this version must have a digest, earlier ones need none.
        field: the integer field that holds the version.

    Returns:
        All fields except the digest.

    Raises:
        FileError: the file is damaged, was changed after it was written, or has a later version.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.storage.manifests import read_manifest, write_manifest
        >>> with tempfile.TemporaryDirectory() as home:
        ...     write_manifest(f"{home}/manifest.json", {"version": 1, "episodes": 20})
        ...     read_manifest(f"{home}/manifest.json", remedy="write it again", version=1).take("episodes", int)
        20
    """
    content = dict(Fields.read(path, remedy=remedy).content)
    digest = content.pop(_DIGEST, None)
    fields = Fields(content, path, remedy)
    found = fields.at_least(field, 1)
    if found > version:
        raise fields.error(f"has version {found}, but this release reads versions up to {version}")
    if digest is None and found == version:
        raise fields.error(f'has no field "{_DIGEST}"')
    if digest is not None and digest != json_digest(content):
        raise fields.error("was changed after it was written: its digest does not match its content")
    return fields
