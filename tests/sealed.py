"""Change a record on disk as somebody would who knows the format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_lang._files import write_checksums, write_manifest


def reseal(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the fields of a record; its digest matches again, and so do the checksums of its folder if it has some."""
    content = json.loads(path.read_text())
    del content["digest"]
    change(content)
    write_manifest(path, content)
    if (path.parent / "checksums.json").exists():
        write_checksums(path.parent)
