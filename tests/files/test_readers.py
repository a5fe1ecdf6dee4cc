"""Damaged files end in one-line errors that name the file and the remedy."""

import contextlib
import os

import pytest
import torch
from safetensors.torch import save_file

from torchrl_lang._files import (
    FileError,
    file_errors,
    file_in,
    parse_rows,
    read_csv_records,
    read_json,
    read_json_list,
    read_tensors,
    read_text,
    shorten,
    write_json,
    write_manifest,
)

FIX = "write it again"


def test_integers_have_64_bits(tmp_path):
    limits = [-(2**63), 2**63 - 1]
    write_json(tmp_path / "a.json", limits)
    assert read_json_list(tmp_path / "a.json", remedy=FIX) == limits
    for beyond in (limits[0] - 1, limits[1] + 1):
        (tmp_path / "a.json").write_text(f"[{beyond}]")
        assert "has more than 64 bits" in error_of(read_json_list, tmp_path / "a.json")


def test_a_table_of_numbers():
    _, [(_, row)] = parse_rows(f"a,b\n{2**63 - 1},{2**63}\n", "t.csv", remedy=FIX)
    assert row == {"a": 2**63 - 1, "b": 2.0**63}
    assert [type(number) for number in row.values()] == [int, float]
    for cells in ("1", "1,2,3"):
        assert "(line 2: " in error_of(parse_rows, f"a,b\n{cells}\n", "t.csv")


def error_of(read, *arguments):
    with pytest.raises(FileError) as caught:
        read(*arguments, remedy=FIX)
    message = str(caught.value)
    assert message.endswith(f": {FIX}.")
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize(
    ("read", "content", "found"),
    [
        (read_json, b"{", "is not valid JSON"),
        (read_json, b"[1]", "holds [1], not a JSON object"),
        (read_json, b'{"a": NaN}', "NaN is not a JSON number"),
        (read_json, b'{"a": 1, "a": 2}', "the key 'a' is repeated"),
        (read_json, b"\xff\xfe{}", "is not UTF-8 text ('utf-8' codec can't decode byte 0xff in position 0"),
        (read_json, b"[" * 100_000, "is not valid JSON"),
        (read_json, b'"' + b"x" * 10_000_000 + b'"', "not a JSON object"),
        (read_json_list, b"{}", "not a JSON list"),
        (read_json_list, b"[NaN]", "NaN is not a JSON number"),
    ],
    ids=["cut", "list", "nan", "twice", "utf-16", "deep", "long", "no list", "nan in a list"],
)
def test_json_that_is_damaged(tmp_path, read, content, found):
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    assert found in error_of(read, path)


def test_other_files_that_are_not_read(tmp_path):
    path = tmp_path / "rewards.json"
    path.write_text("[1, [2]]")
    assert read_json_list(path, remedy=FIX) == [1, [2]]
    with pytest.raises(FileError, match="has 8 bytes, more than the limit of 7"):
        read_json_list(path, remedy=FIX, max_bytes=7)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in error_of(read_text, tmp_path / "pipe")
    assert "not a regular file" in error_of(read_text, tmp_path)
    assert "is missing" in error_of(read_text, tmp_path / "nothing")


def test_every_cut_and_every_flipped_header_byte_of_a_tensor_file_is_read_whole_or_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(6.0).view(2, 3)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        error_of(read_tensors, path)
    for place in range(len(whole) - 24):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(FileError):  # some flips give another name or type: checksums find these
            assert all(torch.is_tensor(value) for value in read_tensors(path, remedy=FIX).values())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", 3, None, "a\0b", "..\\x"])
def test_names_that_lead_out_of_the_folder(tmp_path, name):
    error_of(file_in, tmp_path, name)


def test_a_link_may_lead_out_of_the_folder_only_where_links_are_allowed(tmp_path):
    (tmp_path / "link").symlink_to("../other")
    assert "lies outside of it" in error_of(file_in, tmp_path, "link")
    assert file_in(tmp_path, "link", remedy=FIX, links=True) == tmp_path / "link"


def test_values_are_cut_beyond_the_limit():
    assert shorten(12345678, 8) == "12345678"
    assert shorten(123456789, 8) == "12345..."


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"crane"}, b"crane"])
def test_what_is_no_json_is_not_written(tmp_path, value):
    for write in (write_json, write_manifest):
        with pytest.raises(ValueError, match=r"cannot be written to .*file.json as JSON"):
            write(tmp_path / "file.json", {"x": value})
    assert not list(tmp_path.iterdir())


def test_csv_records_by_line_whatever_is_broken(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a ""b"",\nc"\n\n2,\xff\n3\n4,"x" y\n5,d\n6,"open\n7,e\n')
    found = [(record.line, record.fields or record.error.partition(" (")[0]) for record in read_csv_records(path)]
    assert found == [
        (1, ("id", "text")),
        (2, ("1", 'a "b",\nc')),
        (5, "holds a byte that is not utf-8"),
        (6, "has 1 fields, the header has 2"),
        (7, "is no CSV record"),
        (8, ("5", "d")),
        (9, "is no CSV record"),
    ]
    assert [len(record.fields) for record in read_csv_records(path, ragged=True, encoding="latin-1")][3] == 1
    with pytest.raises(ValueError, match="klingon"):
        next(read_csv_records(path, encoding="klingon"))
    with pytest.raises(FileError, match="is missing"):
        next(read_csv_records(tmp_path / "b.csv"))


def test_a_library_s_message_stands_in_brackets_without_its_full_stop_or_shows_that_it_was_cut(tmp_path):
    for said, shown in (("It ends. Here.", "(It ends. Here): fix it."), ("far " * 200, "far f...): fix it.")):
        with pytest.raises(FileError) as caught, file_errors(tmp_path / "file", "is bad", "fix it", ValueError):
            raise ValueError(said)
        assert str(caught.value).endswith(shown)
