"""Reading the CSV and index files of Reddit comments, undamaged and damaged."""

from __future__ import annotations

import csv
import json
import random
import re
import warnings

import pytest

from tests.envs.reddit.csv_writer import (
    DAMAGE,
    HEADER,
    NEGATIVE,
    POSITIVE,
    cut_row,
    empty_line,
    open_quote,
    row,
    stray_quote,
    texts,
    write_csv,
    write_folder,
    wrong_score,
)
from torchrl_lang._files import FileError, read_csv_records
from torchrl_lang.envs.reddit import RedditComments, read_comment_rows, read_row_indices

GOOD = [("well done", 12, "my tomatoes"), ('a "b", c\nd', 3, "p, q")]
BAD = [("so what", -4, "my tomatoes")]


def read(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return RedditComments.read(folder, on_bad_rows="report", **options)


def test_columns_by_position_and_positive_first(tmp_path):
    data = RedditComments.read(write_folder(tmp_path, GOOD, BAD))
    assert data.comments == ("well done", 'a "b", c\nd', "so what")
    assert data.scores == (12, 3, -4)
    assert data.parents == ("my tomatoes", "p, q", "my tomatoes")
    assert data.files == (POSITIVE, POSITIVE, NEGATIVE)
    assert data.lines == (2, 3, 2)
    assert (data.report.rows, data.report.bad) == (3, ())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("seed", range(10))
def test_any_text_comes_back(tmp_path, seed, end):
    source = random.Random(seed)
    rows = [(texts(source), source.randint(-99, 99), texts(source)) for _ in range(30)]
    data = RedditComments.read(write_folder(tmp_path, rows[:20], rows[20:], end=end))
    assert list(zip(data.comments, data.scores, data.parents, strict=True)) == rows


@pytest.mark.parametrize(
    ("options", "encoding"),
    [
        ({}, "utf-8"),
        ({"bom": b"\xef\xbb\xbf"}, "utf-8"),
        ({"encoding": "latin-1"}, "latin-1"),
        ({"encoding": "utf-16"}, "UTF_16"),
    ],
)
def test_encodings(tmp_path, options, encoding):
    folder = write_folder(tmp_path, [("caf\xe9", 1, "na\xefve")], [], **options)
    data = RedditComments.read(folder, encoding=encoding)
    assert (data.comments, data.parents) == (("caf\xe9",), ("na\xefve",))


def test_latin_1_read_as_utf_8_is_reported(tmp_path):
    folder = write_folder(tmp_path, [("caf\xe9", 1, "a"), ("tea", 1, "b")], BAD, encoding="latin-1")
    data = read(folder)
    assert data.comments == ("tea", "so what")
    assert str(data.report.bad[0]) == f"{POSITIVE} line 2 holds a byte that is not utf-8 (0xe9)"


@pytest.mark.parametrize("encoding", ["klingon", "base64", "utf-16", "a\0b"])
def test_encodings_that_do_not_fit(tmp_path, encoding):
    with pytest.raises(ValueError, match=r"no text encoding|cannot be read as utf-16"):
        RedditComments.read(write_folder(tmp_path, GOOD, BAD), encoding=encoding)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a,b,c", "has 3 fields, the header has 12"),
        (row("x", "many", "y"), 'has "many" as score, expected an integer'),
        (row("x", "1.5", "y"), 'has "1.5" as score, expected an integer'),
        (row(" ", 1, "y"), "has an empty comment"),
        (row("x", 1, "y") + ",more", "has 13 fields, the header has 12"),
        (row("x", 1, "y\0"), "holds a NUL byte"),
        ('"' + row("x", 1, "y"), "has quotes that do not match"),
        ("", "is an empty line"),
    ],
)
def test_malformed_rows(tmp_path, line, reason):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row(*GOOD[0]), line, row(*GOOD[1])])
    with pytest.raises(FileError, match=r"3 rows were read, 1 is malformed: .* line 3 .*on_bad_rows='report'") as error:
        RedditComments.read(tmp_path)
    assert reason in str(error.value)
    with pytest.warns(UserWarning, match="1 is malformed"):
        data = RedditComments.read(tmp_path, on_bad_rows="report")
    (bad,) = data.report.bad
    assert (bad.row, bad.file, bad.line) == (1, POSITIVE, 3)
    assert bad.reason.startswith(reason)
    assert data.comments == (*(each[0] for each in GOOD), "so what")


def test_empty_lines_at_the_end_are_no_rows(tmp_path):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row(*GOOD[0]), "", ""])
    assert len(RedditComments.read(tmp_path)) == 2


def test_a_quote_that_is_never_closed_costs_one_row(tmp_path):
    write_folder(tmp_path, [], BAD)
    lines = [row(f"comment {number}", 1, "p") for number in range(2000)]
    write_csv(tmp_path / POSITIVE, [*lines[:5], '"' + lines[5], *lines[6:]])
    data = read(tmp_path)
    assert [bad.line for bad in data.report.bad] == [7]
    assert data.report.rows == 2000


def test_rows_between_the_quotes_of_two_others_are_read(tmp_path):
    """A quote opens in one row, and a later row has one for inches: the rows between them are no comment."""
    write_folder(tmp_path, [], BAD)
    opens = row("x", 3, "p").replace("x", '"open')
    closes = row("x", 4, "p").replace("x", 'it is 5"')
    for inside in ([], [row("good 1", 1, "p")], [row("good 1", 1, "p"), row('good, "2"', 2, "p"), "part"]):
        write_csv(tmp_path / POSITIVE, [row("first", 1, "p"), opens, *inside, closes, row("last", 1, "p")])
        data = read(tmp_path)
        good = [line for line in inside if line != "part"]
        assert data.report.rows + len(data.report.bad) == 5 + len(inside)
        assert data.comments[: 1 + len(good)] == ("first", "good 1", 'good, "2"')[: 1 + len(good)]
        assert data.comments[-3:] == ('it is 5"', "last", "so what")
        reason = "(',' expected" if "part" in inside else "(there are rows between them)"
        assert str(data.report.bad[0]).startswith(f"{POSITIVE} line 3 has quotes that do not match {reason}")


def test_comments_of_several_lines_with_commas_and_numbers_are_rows(tmp_path):
    listed = "my list, 1, 2\n1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12\n1,2,3,4,5,6,7,8,9,10,11\nis, long, 4, 5, 6, 7, 8"
    table = "a,b,c\n1,2,3\n4,5,6\n,,,,,"
    data = RedditComments.read(write_folder(tmp_path, [(listed, 1, table), (table, 2, listed)], BAD))
    assert data.comments == (listed, table, "so what")


def test_long_fields(tmp_path):
    """A record over many lines is one, and a field that is too long is named as such."""
    write_folder(tmp_path, [], BAD)
    lines = "\n".join(f"a, b, c {number}" for number in range(40_000))
    write_csv(tmp_path / POSITIVE, [row(lines, 3, "p"), row("x" * (1 << 20), 1, "p"), row("x" * (2 << 20), 1, "p")])
    limit = csv.field_size_limit()
    data = read(tmp_path)
    assert csv.field_size_limit() == limit  # other readers of the process keep theirs
    assert data.comments == (lines, "x" * (1 << 20), "so what")
    assert [bad.reason for bad in data.report.bad] == ["has a field of more than 1,048,576 characters"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: '"' + line,
        lambda line: '"f0" x,' + line,
        lambda line: line.replace("f0", '"f\\"0\\""'),
        lambda line: line.replace("f0", "f0,\0").replace("f1,", ""),
        lambda line: line.replace(",f9", ""),
    ],
)
def test_each_row_of_a_file_is_damaged(tmp_path, damage):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [damage(row("a, b", number, 'say "p"')) for number in range(50)])
    data = read(tmp_path)
    assert data.comments == ("so what",)
    assert [bad.line for bad in data.report.bad] == list(range(2, 52))


def test_lines_of_a_broken_record_are_counted_to_it(tmp_path):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row("a\nb\nc", 1, "p")[:-1] + '"x', row("d", 1, "p"), '"' + row("e\nf\ng", 1, "p")])
    data = read(tmp_path)
    assert data.comments[:1] == ("a\nb\nc",)  # a quote inside an unquoted field is text
    assert [(bad.line, bad.last_line) for bad in data.report.bad] == [(6, 8)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n", "header of 2 columns, expected at least 11"),
        (b'"' + HEADER.encode() + b"\n", "has a header that has quotes that do not match"),
        (b"\n\n", "is empty"),
        (row("x", 1, "y").encode(), 'has no header, but "1" as score in its first line'),
        *(
            (row("x", score, "y").encode(), "has no header, but")
            for score in ("1.0", "", "NaN", "1e400", "--3", "\uff11")
        ),
    ],
)
def test_headers(tmp_path, content, message):
    write_folder(tmp_path, GOOD, BAD)
    (tmp_path / NEGATIVE).write_bytes(content)
    with pytest.raises(FileError, match=message):
        RedditComments.read(tmp_path, on_bad_rows="report")


def test_missing_files(tmp_path):
    with pytest.raises(FileError, match=r"comments_positive\.csv is missing"):
        RedditComments.read(tmp_path)
    with pytest.raises(ValueError, match="on_bad_rows='skip' is unknown"):
        RedditComments.read(tmp_path, on_bad_rows="skip")


def test_index_files_select_rows_in_their_order(tmp_path):
    write_folder(tmp_path, GOOD, BAD)
    path = tmp_path / "train_idxs.json"
    path.write_text("[2, 0]")
    assert RedditComments.read(tmp_path, path).comments == ("so what", "well done")
    path.write_text("[]")
    assert len(RedditComments.read(tmp_path, path)) == 0


def test_index_files_count_malformed_rows(tmp_path):
    write_folder(tmp_path, [], BAD)
    write_csv(tmp_path / POSITIVE, [row(*GOOD[0]), "broken", row(*GOOD[1])])
    path = tmp_path / "train_idxs.json"
    path.write_text("[1, 3, 2]")
    with pytest.warns(UserWarning, match=r"3 rows were read, 1 is malformed \(1 of the index file\): "):
        data = RedditComments.read(tmp_path, path, on_bad_rows="report")
    assert data.comments == ("so what", GOOD[1][0])
    assert data.report.bad_indices == (1,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[0, 1", "not valid JSON"),
        ('{"a": 1}', "not a JSON list"),
        ("[0, 1.0]", "1.0 as item 1"),
        ("[true]", "true as item 0"),
        ('["0"]', '"0" as item 0'),
        ("[-1]", "-1 as item 0"),
        ("[0, 2, 0]", "the row 0 twice, again as item 2"),
        ("[0, 3]", "has the row 3, but the files of .* have 3 rows"),
    ],
)
def test_wrong_index_files(tmp_path, content, message):
    write_folder(tmp_path, GOOD, BAD)
    path = tmp_path / "train_idxs.json"
    path.write_text(content)
    with pytest.raises(FileError, match=message):
        RedditComments.read(tmp_path, path)


def test_a_long_index_file(tmp_path):
    path = tmp_path / "train_idxs.json"
    path.write_text(json.dumps(list(range(50_000))))
    assert read_row_indices(path)[-1] == 49_999


def damaged(source):
    """The rows of a file as bytes and whether each is good; after a row with a wrong quote comes no short one."""
    rows, good, damage = [], [], None
    for _ in range(30):
        data = row(texts(source), "SCORE", texts(source), always=source.random() < 0.2)
        short = {cut_row, empty_line} if damage in (open_quote, stray_quote) else set()
        hit = source.random() < 0.25
        damage = source.choice([each for each in DAMAGE if each not in short]) if hit else None
        if damage in (wrong_score, open_quote, stray_quote):  # lines after an open quote may look like a row
            data = row("one, line", "SCORE", 'a "p"')
        data = damage(data.encode(), source) if hit else data.encode()
        rows.append(data.replace(b"SCORE", str(source.randint(-9, 9)).encode()))
        good.append(not hit)
    return [*rows, row("the last one", 1, "p").encode()], [*good, True]


@pytest.mark.parametrize("seed", range(100))
def test_damaged_files_lose_no_row(tmp_path, seed):
    """Rows read and rows reported are the rows present, each at its line."""
    (tmp_path / NEGATIVE).write_text(HEADER + "\n")
    rows, good = damaged(random.Random(seed))
    (tmp_path / POSITIVE).write_bytes(b"\n".join([HEADER.encode(), *rows, b""]))
    starts, line = [], 2
    for data in rows:
        starts.append(line)
        line += 1 + len(re.findall(rb"\r\n|\r|\n", data))
    data = read(tmp_path)
    assert data.report.rows + len(data.report.bad) == len(rows)
    assert data.lines == tuple(start for start, fine in zip(starts, good, strict=True) if fine)
    assert [bad.line for bad in data.report.bad] == [
        start for start, fine in zip(starts, good, strict=True) if not fine
    ]
    assert [bad.row for bad in data.report.bad] == [number for number, fine in enumerate(good) if not fine]
    assert all(bad.reason for bad in data.report.bad)
    with pytest.raises(FileError, match=f"{len(data.report.bad)} (are|is) malformed"):
        RedditComments.read(tmp_path)


@pytest.mark.parametrize("seed", range(100))
def test_random_bytes_anywhere(tmp_path, seed):
    """Whatever the damage, each line belongs to one record or error, or is an empty one at the end."""
    source = random.Random(seed)
    rows = [row(texts(source), source.randint(-9, 9), texts(source)) for _ in range(20)]
    content = bytearray("\n".join([HEADER, *rows, ""]).encode())
    for _ in range(source.randint(1, 12)):
        place = source.randrange(len(HEADER) + 1, len(content))
        end = place + source.choice([0, 1, 1, 5, 60])
        content[place:end] = source.choice([b"", b'"', b",", b"\n", b"\r", b"\0", b"\xff", b'"",', b"\n\n", b"abc"])
    (tmp_path / "file.csv").write_bytes(content)
    lines = len(re.split(rb"\r\n|\r|\n", bytes(content)))
    records = list(read_csv_records(tmp_path / "file.csv"))
    covered = [number for record in records for number in range(record.line, record.last_line + 1)]
    assert covered == list(range(1, len(covered) + 1))
    assert all(not line for line in re.split(rb"\r\n|\r|\n", bytes(content))[len(covered) : lines])
    assert all(bool(record.fields) != bool(record.error) for record in records)
    (tmp_path / POSITIVE).write_bytes(content)
    (tmp_path / NEGATIVE).write_text(HEADER + "\n")
    assert len(list(read_comment_rows(tmp_path))) == len(records) - 1
