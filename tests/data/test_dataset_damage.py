"""What is read from a data set is what was written, or an error of one line: whatever happened to its files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.kills import kills
from torchrl_lang._files import FileError
from torchrl_lang._files.manifests import json_digest
from torchrl_lang.data import DatasetWriter, datasets, load_dataset
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

WORDS = CharTokenizer.from_alphabet("abc")
EPISODES = [
    Episode([Turn("ab", 1.0), Turn("c")], terminated=True),
    Episode([Turn("cab"), Turn("a", -2.5)], terminated=False, truncated=True),
    Episode([Turn("b", 0.0)], terminated=True),
]
ROWS = to_rows(EPISODES, WORDS, 12)
VERSION_1 = Path(__file__).parent / "formats" / "version_1"
"""Written by the release before checksums of the manifest."""


@pytest.fixture
def folder(tmp_path):
    with DatasetWriter(tmp_path / "data", WORDS, 12, seed=7, source="three") as writer:
        writer.notes = {"words": ["crane"]}
        writer.extend(ROWS)
    return writer.folder


@pytest.fixture
def settled(monkeypatch):
    """Stamps are written without waiting for two seconds."""
    monkeypatch.setattr(datasets, "_SETTLED", -1)


def is_as_written(dataset):
    return (
        bool((dataset[:] == ROWS).all())
        and dataset.tokenizer.config() == WORDS.config()
        and dataset.manifest["notes"] == {"words": ["crane"]}
        and dataset.manifest["mean_return"] == -0.5
    )


def mutate(path, draw):
    """One of the ways in which files are damaged."""
    data = bytearray(path.read_bytes())
    how = draw.choice(["flip", "flip", "flip", "cut", "add", "swap", "zero", "gone", "link"])
    place = draw.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[place:]
    elif how == "add":
        data[place:place] = draw.randbytes(draw.randrange(1, 9))
    elif how == "swap":
        data[place : place + 1] = draw.choice([b"0", b"1", b"9", b"-", b'"', b"}", b"\n", b" "])
    elif how == "zero":
        data[:] = bytes(len(data))
    path.unlink()
    if how == "link":
        path.symlink_to("/dev/zero")
    elif how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_data_set_is_refused_or_unharmed(folder, seed):
    """Unharmed: such as blanks between the fields of the manifest."""
    draw = random.Random(seed)
    mutate(draw.choice(sorted(path for path in folder.rglob("*") if path.is_file())), draw)
    try:
        dataset = load_dataset(folder)
    except (FileError, FileNotFoundError) as error:
        message = str(error)
    else:
        assert is_as_written(dataset)
        return
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 500


def edit(folder, name, change, *, seal=True):
    """Change a JSON file, and where asked all digests so that they fit again."""
    content = json.loads((folder / name).read_text())
    change(content)
    if name == "manifest.json" and seal:
        content.pop("digest")
        content["digest"] = json_digest(content)
    (folder / name).write_text(json.dumps(content))
    if name != "manifest.json" and seal:
        reseal(folder)


def reseal(folder):
    """Make the checksums of the manifest fit the files, as somebody who edits a data set by hand would."""

    def checksums(content):
        for key, entry in content["entries"].items():
            entry["sha256"] = hashlib.sha256((folder / "rows" / f"{key}.memmap").read_bytes()).hexdigest()
        for name in content["files"]:
            content["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        config = json.loads((folder / "tokenizer.json").read_text())
        sorted_config = json.dumps(config, sort_keys=True).encode()
        content["tokenizer"]["fingerprint"] = hashlib.sha256(sorted_config).hexdigest()[:16]

    edit(folder, "manifest.json", checksums)


def poke(folder, key, place, value):
    rows = TensorDict.load_memmap(folder / "rows")
    tensor = rows[key].view(torch.uint8) if rows[key].dtype == torch.bool else rows[key]
    tensor[place] = value
    del rows
    reseal(folder)


@pytest.mark.parametrize(
    ("key", "place", "value", "found"),
    [
        ("tokens", (0, 1), 9, "Row 0 has a token id out of range at position 1"),
        ("tokens", (1, 1), -1, "Row 1 has a token id out of range"),
        ("tokens", (2, 11), 70, "Padding holds the id 70"),
        ("token_reward", (0, 3), float("nan"), "reward that is not finite"),
        ("token_reward", (0, 3), float("inf"), "reward that is not finite"),
        ("token_reward", (0, 0), 1.0, "reward on a token that the agent did not write"),
        ("token_reward", (0, 3), 2.0, 'as "mean_return", the rows have'),
        ("attention_mask", (0, 11), 1, "real token right of padding"),
        ("attention_mask", (0, 0), 255, "attention_mask.memmap holds bytes other than 0 and 1"),
        ("agent_mask", (0, 1), 2, "agent_mask.memmap holds bytes other than 0 and 1"),
        ("agent_mask", (0, 0), 1, "an agent's token at position 0"),
        ("agent_mask", (0, 2), 0, 'as "decisions", the rows have'),
        ("terminated", (0, 0), 128, "terminated.memmap holds bytes other than 0 and 1"),
        ("terminated", (0, 0), 0, 'as "terminated", the rows have 1'),
        ("truncated", (0, 0), 1, 'as "truncated", the rows have 2'),
    ],
)
def test_values_are_checked_whatever_the_checksums_say(folder, key, place, value, found):
    poke(folder, key, place, value)
    with pytest.raises(FileError, match=found):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: m["entries"]["tokens"].update(dtype="float32"), "does not describe 'tokens' as int32"),
        (lambda m: m["entries"]["token_reward"].update(dtype="int32"), "does not describe 'token_reward' as float32"),
        (lambda m: m["entries"]["tokens"].update(shape=[12, 3]), r"as int32 of shape \[3, 12\]"),
        (lambda m: m["entries"]["tokens"].update(shape=[3, -12]), r"as int32 of shape \[3, 12\]"),
        (lambda m: m["entries"].update(extra={}), 'has no field "entries.extra.dtype"'),
        (lambda m: m["entries"].pop("tokens"), 'as "entries", expected'),
        (lambda m: m.update(entries=[]), r'has \[\] as "entries", expected dict'),
        (lambda m: m.update(episodes=0), 'has 0 as "episodes", expected at least 1'),
        (lambda m: m.update(episodes="3"), "has '3' as \"episodes\", expected int"),
        (lambda m: m.update(row_length=10**30), 'as "row_length", expected int'),
        (lambda m: m.update(row_length=10**12), "does not describe 'tokens'"),
        (lambda m: m.update(notes=None), 'has None as "notes", expected dict'),
        (lambda m: m.pop("notes"), 'has no field "notes"'),
        (lambda m: m.update(format="pickle"), "has 'pickle' as \"format\""),
        (lambda m: m.update(version=99), "has version 99, but this release reads versions up to 2"),
        (lambda m: m["files"].update({"../../../etc/passwd": "x"}), "lies outside of it"),
        (lambda m: m["files"].clear(), 'has no field "files.tokenizer.json"'),
        (lambda m: m["tokenizer"].update(vocab_size=10), "has another vocab_size than tokenizer.json"),
        (lambda m: m["tokenizer"].update(fingerprint="x" * 10**6), r"its fingerprint is not 'xxx.*\.\.\., which"),
        (lambda m: m.update(tokens=17), 'has 17 as "tokens", the rows have 18'),
    ],
)
def test_every_field_of_the_manifest_is_checked(folder, change, found):
    edit(folder, "manifest.json", change)
    with pytest.raises(FileError, match=found) as caught:
        load_dataset(folder)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(symbols=c["symbols"][:-1]),
        lambda c: c.update(symbols=[1, 2, 3]),
        lambda c: c["control"].pop("pad"),
        lambda c: c.pop("symbols"),
        lambda c: c.update(kind="huggingface"),
        lambda c: c.update(kind="huggingface", tokenizer={"version": "1.0"}),
        lambda c: c.update(kind=["char"]),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_an_error(folder, change):
    edit(folder, "tokenizer.json", change)
    with pytest.raises(FileError, match=r"tokenizer\.json (is not a valid tokenizer|was changed)") as caught:
        load_dataset(folder)
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(folder):
    path = folder / "rows" / "tokens.memmap"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(FileError, match="lies outside of it"):
        load_dataset(folder)


def test_the_types_in_meta_json_are_not_believed(folder):
    """Anybody's TensorDict reads it; here the manifest counts, and verifying finds the change."""
    meta = folder / "rows" / "meta.json"
    meta.write_text(meta.read_text().replace("torch.int32", "torch.float32"))
    assert is_as_written(load_dataset(folder, verify=False))
    with pytest.raises(FileError, match=r"meta.json was changed after it was written"):
        load_dataset(folder)


def test_rows_are_verified_once_and_again_when_a_file_changes(folder, settled, monkeypatch):
    verified = []
    check = datasets._Stamp.write
    monkeypatch.setattr(datasets._Stamp, "write", lambda self: (verified.append(1), check(self)))
    for count, verify in [(1, "once"), (1, "once"), (1, False), (2, True), (2, "once")]:
        assert is_as_written(load_dataset(folder, verify=verify))
        assert len(verified) == count
    path = folder / "rows" / "tokens.memmap"
    state, data = path.stat(), path.read_bytes()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # changes nothing but the time of change
    load_dataset(folder)
    assert len(verified) == 3
    path.write_bytes(b"\1" + data[1:])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(FileError, match="was changed after it was written"):
        load_dataset(folder)
    path.write_bytes(data)
    assert is_as_written(load_dataset(folder))
    shutil.copytree(folder, folder.parent / "copy")
    load_dataset(folder.parent / "copy")
    assert len(verified) == 5


def test_a_stamp_of_other_data_does_not_count(folder, settled):
    load_dataset(folder)
    stamp = (folder / ".verified.json").read_text()
    edit(folder, "manifest.json", lambda content: content.update(tokens=17))
    (folder / ".verified.json").write_text(stamp)
    with pytest.raises(FileError, match='as "tokens"'):
        load_dataset(folder)
    for damaged in ("", "{", "[]", "null", '{"manifest": 3}'):
        (folder / ".verified.json").write_text(damaged)
        with pytest.raises(FileError, match='as "tokens"'):
            load_dataset(folder)


def test_files_that_have_just_changed_are_not_stamped(folder):
    """A second change within the clock's step would not show."""
    load_dataset(folder)
    assert not (folder / ".verified.json").exists()


def test_a_folder_that_cannot_be_written_to_is_verified_each_time(folder, settled, monkeypatch):
    def refuse(path, content):
        raise PermissionError(path)

    monkeypatch.setattr(datasets, "write_file", refuse)
    assert is_as_written(load_dataset(folder))
    assert not (folder / ".verified.json").exists()


def test_data_sets_of_the_first_version_are_read_and_verified(tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(VERSION_1, folder)
    assert (load_dataset(folder)[:] == ROWS).all()
    (folder / "rows" / "token_reward.memmap").write_bytes(bytes(144))
    with pytest.raises(FileError, match=r"token_reward.memmap was changed"):
        load_dataset(folder)


@pytest.mark.slow
def test_a_writer_killed_at_any_step_leaves_no_half_data_set_and_the_next_no_leftovers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing that it wrote
    folder, old = tmp_path / "data", ROWS[:1]

    def write(rows):
        with DatasetWriter(folder, WORDS, 12, overwrite=True) as writer:
            for row in rows.split(1):
                writer.extend(row)

    write(old)
    for _ in kills(lambda: write(ROWS)):
        if folder.exists():
            dataset = load_dataset(folder, verify=True)
            assert (dataset[:] == (ROWS if len(dataset) == 3 else old)).all()
        else:
            with pytest.raises(FileNotFoundError, match="writing was interrupted or is still in progress"):
                load_dataset(folder)
        write(old)
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "rows", "tokenizer.json"]
    assert (load_dataset(folder, verify=True)[:] == ROWS).all()


def test_notes_that_are_no_json_are_refused_when_they_are_written(tmp_path):
    def write(notes):
        with DatasetWriter(tmp_path / "data", WORDS, 12) as writer:
            writer.notes = notes
            writer.extend(ROWS)

    for notes in ({"rate": float("nan")}, {"words": {"crane"}}):
        with pytest.raises(ValueError, match=r"cannot be written to .* as JSON"):
            write(notes)
        assert list(tmp_path.iterdir()) == []
