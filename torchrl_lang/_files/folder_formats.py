"""Folders of one kind, such as those of a saved model: a JSON file, further files, and the checksums of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_lang._files.fields import Fields
from torchrl_lang._files.folders import refuse_content, write_folder
from torchrl_lang._files.manifests import (
    check_replaceable,
    read_manifest,
    verify_checksums,
    write_checksums,
    write_manifest,
)

__all__ = ["FolderFormat"]


@dataclass(frozen=True)
class FolderFormat:
    """How folders of one kind are written and read.

    Args:
        config: name of the JSON file.
        needs: names of the other files that are read, with ``/`` between folders.
        remedy: what the user can do about a damaged folder, for error messages.
        version: of new folders, and the latest that can be read.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang._files import FolderFormat
        >>> counter = FolderFormat("counter.json", ("words.txt",), remedy="save the counter again", version=1)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with counter.write(home, {"least": 2}) as folder:
        ...         _ = (folder / "words.txt").write_text("a b")
        ...     counter.read(home).take("least", int)
        2
    """

    config: str
    needs: tuple[str, ...]
    remedy: str
    version: int

    @contextmanager
    def write(self, folder: str | Path, config: Mapping[str, Any], *, replace: bool = False) -> Iterator[Path]:
        """Write a folder atomically: the ``with`` block writes the other files into a temporary one.

        Args:
            folder: created if it does not exist.
            config: content of the JSON file.
            replace: whether a folder of this kind is replaced when the new one is complete.

        Raises:
            FileExistsError: the folder exists and is not empty, or with ``replace`` contains other files.
        """
        if replace:
            check_replaceable(folder, self.config)
        else:
            refuse_content(folder)
        with write_folder(folder) as target:
            yield target
            write_manifest(target / self.config, {"version": self.version, **config})
            write_checksums(target)

    def read(self, folder: str | Path) -> Fields:
        """Check that all files are as they were written, and read the JSON file.

        Raises:
            FileError: a file is missing or damaged, or the folder has a later version.
        """
        folder = Path(folder)
        verify_checksums(folder, remedy=self.remedy, needs=(self.config, *self.needs))
        return read_manifest(folder / self.config, remedy=self.remedy, version=self.version)
