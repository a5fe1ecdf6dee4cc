"""What is read from a dataset is what was written, or an error of one line, whatever happened to its files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from contextlib import suppress

import pytest
import torch
from tensordict import TensorDict

from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.data import DatasetWriter, dataset, load_dataset, write_dataset
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

WORDS = CharTokenizer.from_alphabet("abc")
EPISODES = [
    Episode([Turn("ab", 1.0), Turn("c")], terminated=True),
    Episode([Turn("cab"), Turn("a", -2.5)], terminated=False, truncated=True),
    Episode([Turn("b", 0.0)], terminated=True),
]
ROWS = to_rows(EPISODES, WORDS, 12)
KEPT = {
    "kind": torch.tensor([0, 2, 1]),
    "train_mask": ROWS["agent_mask"].logical_not(),
    "scores": torch.arange(12.0).view(3, 2, 2),
}
NOTES = {"words": ["crane"]}


def more_rows(**entries):
    return ROWS.clone().update({**KEPT, **entries})


@pytest.fixture
def folder(tmp_path):
    options = {"seed": 7, "source": "three of them", "keep": [*KEPT], "notes": NOTES}
    return write_dataset(tmp_path / "data", more_rows(dropped=torch.ones(3, 1)), WORDS, **options).folder


@pytest.fixture
def settled(monkeypatch):
    """Stamps are written without waiting for two seconds."""
    monkeypatch.setattr(dataset, "_SETTLED", -1)


def is_as_written(read):
    return (
        bool((read[:] == more_rows()).all())
        and read.tokenizer.config() == WORDS.config()
        and (read.manifest["notes"], read.manifest["mean_return"]) == (NOTES, -0.5)
    )


def test_what_was_written_is_read(folder):
    read = load_dataset(folder, verify=True)
    assert is_as_written(read)
    assert len(read) == 3
    assert [read.episode(index) for index in range(3)] == EPISODES
    assert read.rows["tokens"].dtype == torch.int32
    assert read[torch.tensor([2, 0])]["tokens"].dtype == torch.int64
    read[0]["token_reward"].fill_(9.0)  # memory of its own
    assert is_as_written(load_dataset(folder, verify=True))
    # Anyone with tensordict alone can open the rows.
    assert (TensorDict.load_memmap(folder / "rows", allow_pickle=False) == more_rows()).all()
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".memmap"}


def test_the_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    counted = {key: manifest[key] for key in ("episodes", "tokens", "decisions", "terminated", "truncated")}
    assert counted == {"episodes": 3, "tokens": 7 + 7 + 4, "decisions": 3 + 2 + 2, "terminated": 2, "truncated": 1}
    assert manifest["mean_return"] == -0.5
    assert (manifest["seed"], manifest["source"], manifest["row_length"]) == (7, "three of them", 12)
    assert manifest["entries"]["scores"]["shape"] == [3, 2, 2]
    assert set(manifest["created_by"]) == {"torchrl_lang", "tensordict", "torch"}


def test_blocks_of_any_size_give_the_same_files(tmp_path, folder):
    options = {"seed": 7, "source": "three of them", "keep": [*KEPT]}
    with DatasetWriter(tmp_path / "blocks", WORDS, 12, **options) as writer:
        writer.notes = NOTES
        for part in (slice(0, 0), slice(0, 2), slice(2, 3)):
            writer.extend(more_rows()[part])
    for path in ("manifest.json", "tokenizer.json", "rows/meta.json", "rows/tokens.memmap", "rows/scores.memmap"):
        assert (tmp_path / "blocks" / path).read_bytes() == (folder / path).read_bytes(), path


class Own:
    """A tokenizer of one's own: a kind that the library does not know."""

    vocab_size, control = WORDS.vocab_size, WORDS.control
    encode, decode = WORDS.encode, WORDS.decode

    def config(self):
        return {"kind": "own"}


def test_tokenizers(tmp_path, folder):
    load_dataset(folder, tokenizer=CharTokenizer.from_alphabet("abc"))
    with pytest.raises(ValueError, match="its ids mean other text"):
        load_dataset(folder, tokenizer=CharTokenizer.from_alphabet("cab"))
    own = Own()
    read = write_dataset(tmp_path / "own", ROWS, own)
    assert read.tokenizer is own
    assert read.episode(0) == EPISODES[0]


def test_a_failed_writer_leaves_nothing(tmp_path):
    with suppress(KeyboardInterrupt), DatasetWriter(tmp_path / "failed", WORDS, 12) as writer:
        writer.extend(ROWS)
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="No episode was written"), DatasetWriter(tmp_path / "empty", WORDS, 12):
        pass
    with pytest.raises(ValueError, match=r"cannot be written to .* as JSON"):
        write_dataset(tmp_path / "data", ROWS, WORDS, notes={"rate": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_overwriting_is_asked_for(tmp_path, folder):
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_dataset(folder, ROWS, WORDS)
    write_dataset(folder, ROWS[:1], WORDS, overwrite=True)
    assert len(load_dataset(folder, verify=True)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("do not delete")
    with pytest.raises(FileExistsError, match="is not empty"):
        write_dataset(tmp_path / "thesis", ROWS, WORDS, overwrite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows["tokens"][0].fill_(9), "Rows from number 3: Row 0 has the id 9 at position"),
        (lambda rows: rows["tokens"][0, -1].fill_(-100), "has the id -100 at position 11: ids, also those of padding"),
        (lambda rows: rows["token_reward"][1, 6].fill_(math.nan), "from number 3: Row 1 has a reward that is not fin"),
        (lambda rows: rows.exclude("truncated", inplace=True), "A row needs 'truncated'"),
        (lambda rows: rows.set("truncated", torch.zeros(3, 1)), "truncated must be bool, got torch.float32"),
        (lambda rows: rows.exclude("tokens", inplace=True), "A row needs 'tokens'"),
        (lambda rows: rows.set("features", torch.zeros(3, 4, 2)), "These rows have .*'features': .*, but this dataset"),
    ],
)
def test_rows_are_checked_on_the_way_in(tmp_path, change, message):
    bad = ROWS.clone()
    change(bad)
    with DatasetWriter(tmp_path / "data", WORDS, 12) as writer:
        writer.extend(ROWS)
        with pytest.raises((ValueError, KeyError, TypeError), match=message):
            writer.extend(bad)
    assert (load_dataset(tmp_path / "data")[:] == ROWS).all()  # nothing of the bad block was written


def test_what_cannot_be_stored_is_refused(tmp_path):
    for entries, keep, found in (
        ({"kind": KEPT["kind"].double()}, ["kind"], "cannot be stored"),
        ({"features": torch.zeros(3, 4, 2, dtype=torch.float16)}, [], "'features', torch.float16, cannot be stored"),
        ({"a/b": KEPT["kind"]}, ["a/b"], "cannot be stored"),
        ({}, ["missing"], "missing"),
    ):
        with pytest.raises((ValueError, KeyError), match=found):
            write_dataset(tmp_path / "data", more_rows(**entries), WORDS, keep=keep)
    assert list(tmp_path.iterdir()) == []


FEATURES = {"features": torch.randn(3, 4, 2), "features_mask": torch.eye(3, 4, dtype=torch.bool)}


@pytest.mark.parametrize("keep", [[], ["kind"], ["features"]])
def test_features_are_kept_unasked_in_all_blocks(tmp_path, keep):
    rows = more_rows(**FEATURES)
    with DatasetWriter(tmp_path / "data", WORDS, 12, keep=keep) as writer:
        writer.extend(rows)
        for other in (more_rows(), more_rows(**FEATURES).set("features", torch.zeros(3, 4, 5))):
            with pytest.raises((KeyError, ValueError), match="features"):
                writer.extend(other)
        writer.extend(rows[:1])
    read = load_dataset(tmp_path / "data", verify=True)
    for key, value in FEATURES.items():
        assert torch.equal(read[:][key], torch.cat([value, value[:1]]))
    assert ("kind" in read.rows.keys()) == ("kind" in keep)


@pytest.mark.parametrize(
    ("key", "place", "value", "found"),
    [
        ("tokens", (2, 11), 70, "Row 2 has the id 70 at position 11"),
        ("token_reward", (0, 0), 1.0, "reward on a token that the agent did not write"),
        ("attention_mask", (0, 0), 255, "attention_mask.memmap holds bytes other than 0 and 1"),
    ],
)
def test_values_are_checked_whatever_the_checksums_say(folder, key, place, value, found):
    rows = TensorDict.load_memmap(folder / "rows")
    tensor = rows[key].view(torch.uint8) if rows[key].dtype == torch.bool else rows[key]
    tensor[place] = value
    del rows
    with pytest.raises(FileError, match="was changed after it was written"):
        load_dataset(folder)
    digest = hashlib.sha256((folder / "rows" / f"{key}.memmap").read_bytes()).hexdigest()
    reseal(folder / "manifest.json", lambda content: content["entries"][key].update(sha256=digest))
    with pytest.raises(FileError, match=found):
        load_dataset(folder)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: m.update(version=1), "has version 1, .* reads version 2"),
        (lambda m: m["entries"]["tokens"].update(dtype="float32"), "does not describe 'tokens' as int32"),
        (lambda m: m["entries"].pop("tokens"), r"does not describe \['tokens'\]"),
        (lambda m: m["entries"]["kind"].update(dtype="int32"), "bool, int64 or float32"),
        (lambda m: m["entries"]["kind"].update(shape=[4]), r"as int64 \[3\]"),
        (lambda m: m["entries"].update({"../kind": m["entries"]["kind"]}), "ASCII letters"),
        (lambda m: m.update(episodes=0), 'has 0 as "episodes", expected greater than or equal to 1'),
        (lambda m: m["files"].update({"../../../etc/passwd": "x"}), "lies outside of it"),
        (lambda m: m["files"].clear(), r"does not describe \['rows/meta.json', 'tokenizer.json'\]"),
    ],
)
def test_every_field_of_the_manifest_is_checked(folder, change, found):
    reseal(folder / "manifest.json", change)
    with pytest.raises(FileError, match=found) as caught:
        load_dataset(folder)
    assert len(str(caught.value)) < 500


def test_rows_are_verified_once_and_again_when_a_file_changes(folder, settled, monkeypatch):
    verified = []
    verify = dataset._verify
    monkeypatch.setattr(dataset, "_verify", lambda *args: (verified.append(1), verify(*args)))
    for count, how in [(1, "once"), (1, "once"), (1, False), (2, True), (2, "once")]:
        assert is_as_written(load_dataset(folder, verify=how))
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
    shutil.copytree(folder, folder.parent / "copy")
    load_dataset(folder.parent / "copy")
    assert len(verified) == 5


def test_a_stamp_of_other_data_does_not_count(folder, settled):
    load_dataset(folder)
    stamp = (folder / ".verified.json").read_text()
    reseal(folder / "manifest.json", lambda content: content["files"].update({"rows/meta.json": "0"}))
    for content in (stamp, "", "{", "[]", '{"manifest.json": 3}'):
        (folder / ".verified.json").write_text(content)
        with pytest.raises(FileError, match="was changed after it was written"):
            load_dataset(folder)
