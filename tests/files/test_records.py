"""Records and their folders: written whole or not at all, and read only as they were written."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field, ValidationError, model_validator

from torchrl_lang._files import FileError, Record, RecordFolder, write_manifest


class Entry(Record):
    dtype: str
    shape: tuple[int, ...]


class Manifest(Record):
    FORMAT: ClassVar[str] = "rows"
    VERSION: ClassVar[int] = 2
    rows: Annotated[int, Field(ge=1)]
    mean: float = 0.0
    entries: dict[str, Entry] = {}
    notes: dict[str, Any] = {}

    @model_validator(mode="after")
    def _shapes(self) -> Manifest:
        for name, entry in self.entries.items():
            if entry.shape[:1] != (self.rows,):
                raise ValueError(f"does not describe {name!r} as an entry of {self.rows} rows")
        return self


MANIFEST = Manifest(
    rows=3, mean=1, entries={"tokens": Entry(dtype="int32", shape=(3, 8))}, notes={"é": [1, None, {"a": "\n"}]}
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    MANIFEST.write(tmp_path / "manifest.json")
    assert Manifest.read(str(tmp_path / "manifest.json"), remedy="") == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert [*content] == ["format", "version", "rows", "mean", "entries", "notes", "digest"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": "3"}, "has '3' as \"rows\", expected a valid integer"),
        ({"rows": True}, 'has True as "rows"'),
        ({"rows": 0}, 'has 0 as "rows", expected greater than or equal to 1'),
        ({"rows": 10**30}, "64 bits"),
        ({"rows": ...}, 'has no field "rows"'),
        ({"further": 1}, 'has the unknown field "further"'),
        ({"x" * 81: 1}, f'has the unknown field "{"x" * 80}"'),
        ({"entries": {"a": {"dtype": "bool", "shape": [3, "8"]}}}, "has '8' as \"entries.a.shape.1\""),
        ({"entries": {"a": {"dtype": "bool", "shape": [4]}}}, "does not describe 'a' as an entry of 3 rows"),
        ({"format": "words"}, "has format 'words', but this release reads format 'rows'"),
        ({"version": 1}, "has version 1, but this release reads version 2"),
        ({"version": 2.0}, "has version 2.0"),
    ],
)
def test_what_a_record_does_not_hold(tmp_path, fields, message):
    path = tmp_path / "manifest.json"
    MANIFEST.write(path)
    content = json.loads(path.read_text()) | fields
    write_manifest(path, {name: value for name, value in content.items() if name != "digest" and value != ...})
    with pytest.raises(FileError) as caught:
        Manifest.read(path, remedy="write it again")
    found = str(caught.value)
    assert message in found
    assert re.fullmatch(rf"{path} .*: write it again\.", found)  # a point matches no line break


@pytest.mark.parametrize(
    ("old", "new"),
    [('"rows": 3', '"rows": 4'), ('"digest"', '"other"'), ('"mean": 1.0', '"mean": NaN'), ("}", "")]
    + [('"mean": 1.0', '"mean": 1e999'), ('"rows": 3', '"rows": 3, "rows": 3')],
)
def test_edited_files_are_found(tmp_path, old, new):
    path = tmp_path / "manifest.json"
    MANIFEST.write(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FileError, match="write it again"):
        Manifest.read(path, remedy="write it again")
    with pytest.raises(ValidationError):
        Manifest(rows=1, mean=float("inf"))


FOLDERS = RecordFolder(Manifest, "manifest.json", ("deep/words.txt",), remedy="save the words again")


def save(folder, text="a b", **options):
    with FOLDERS.write(folder, MANIFEST, **options) as target:
        (target / "deep").mkdir()
        (target / "deep" / "words.txt").write_text(text)


def test_a_folder_is_read_as_it_was_written(tmp_path):
    save(tmp_path / "saved")
    assert FOLDERS.read(str(tmp_path / "saved")) == MANIFEST
    with pytest.raises(FileExistsError, match="is not empty"):
        save(tmp_path / "saved", "other words")
    save(tmp_path / "saved", "other words", replace=True)
    assert (tmp_path / "saved" / "deep" / "words.txt").read_text() == "other words"
    (tmp_path / "saved" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        save(tmp_path / "saved", replace=True)


@pytest.mark.parametrize("name", ["deep/words.txt", "manifest.json", "checksums.json"])
def test_every_damaged_file_is_found(tmp_path, name):
    save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    for damage in (lambda: path.write_text("x" + path.read_text()[1:]), path.unlink):
        damage()
        with pytest.raises(FileError, match="save the words again"):
            FOLDERS.read(tmp_path / "saved")


def test_a_folder_that_lists_too_few_files(tmp_path):
    with RecordFolder(Manifest, "manifest.json", (), remedy="").write(tmp_path / "fewer", MANIFEST):
        pass
    with pytest.raises(FileError, match=r"deep/words\.txt"):
        FOLDERS.read(tmp_path / "fewer")
