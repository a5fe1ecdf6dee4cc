"""Folders of one kind: written whole or not at all, and read only as they were written."""

from __future__ import annotations

import pytest

from torchrl_lang._files import FileError, FolderFormat

WORDS = FolderFormat("words.json", ("deep/words.txt",), remedy="save the words again", version=2)


def save(folder, text="a b"):
    with WORDS.write(folder, {"words": 2}) as target:
        (target / "deep").mkdir()
        (target / "deep" / "words.txt").write_text(text)


def test_a_folder_is_read_as_it_was_written(tmp_path):
    save(tmp_path / "saved")
    assert WORDS.read(str(tmp_path / "saved")).content == {"version": 2, "words": 2}
    with pytest.raises(FileExistsError, match="is not empty: give another folder"):
        save(tmp_path / "saved", "other words")
    assert (tmp_path / "saved" / "deep" / "words.txt").read_text() == "a b"


def test_nothing_is_left_where_writing_failed(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        save(tmp_path / "saved", "\ud800")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["deep/words.txt", "words.json", "checksums.json"])
def test_every_damaged_file_is_found(tmp_path, name):
    save(tmp_path / "saved")
    path = tmp_path / "saved" / name
    path.write_text("x" + path.read_text()[1:])
    with pytest.raises(FileError, match="save the words again"):
        WORDS.read(tmp_path / "saved")
    path.unlink()
    with pytest.raises(FileError, match="save the words again"):
        WORDS.read(tmp_path / "saved")


def test_folders_of_another_kind(tmp_path):
    with FolderFormat("words.json", (), remedy="", version=2).write(tmp_path / "fewer", {}):
        pass
    with pytest.raises(FileError, match=r"deep/words\.txt"):
        WORDS.read(tmp_path / "fewer")
    save(tmp_path / "later")
    with pytest.raises(FileError, match="has version 2, but this release reads versions up to 1"):
        FolderFormat("words.json", (), remedy="update", version=1).read(tmp_path / "later")
