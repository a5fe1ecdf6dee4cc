from __future__ import annotations

import json
import math
import signal
import sys

import pytest
import torch
from tensordict import TensorDict

from tests.processes import run
from torchrl_lang.data import DatasetWriter, load_dataset, write_dataset
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

WORDS = CharTokenizer.from_alphabet("abc")
EPISODES = [
    Episode([Turn("ab", 1.0), Turn("c")], terminated=True),
    Episode([Turn("cab"), Turn("a", -2.5)], terminated=False, truncated=True),
    Episode([Turn("b", 0.0)], terminated=True),
]
KILLED = """
import os, signal, sys
from torchrl_lang.data import DatasetWriter
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
words = CharTokenizer.from_alphabet("abc")
writer = DatasetWriter(sys.argv[1], words, 12).__enter__()
writer.extend(to_rows([Episode([Turn("ab", 1.0)], terminated=True)], words, 12))
os.kill(os.getpid(), signal.SIGKILL)
"""
PICKLE_STARTS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


@pytest.fixture
def rows():
    return to_rows(EPISODES, WORDS, 12)


@pytest.fixture
def folder(tmp_path, rows):
    return write_dataset(tmp_path / "data", rows, WORDS, seed=7, source="three of them").folder


def test_what_was_written_is_read(folder, rows):
    dataset = load_dataset(folder, verify=True)
    assert len(dataset) == 3
    assert (dataset[:] == rows).all()
    assert [dataset.episode(index) for index in range(3)] == EPISODES
    assert dataset.rows["tokens"].dtype == torch.int32
    assert dataset[torch.tensor([2, 0])]["tokens"].dtype == torch.int64
    assert dataset.tokenizer.encode("cab") == WORDS.encode("cab")


def test_it_is_a_plain_memory_mapped_tensordict(folder, rows):
    """Anyone with tensordict alone can open the rows."""
    plain = TensorDict.load_memmap(folder / "rows", allow_pickle=False)
    assert (plain == rows).all()


def test_nothing_is_pickled(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".memmap"}
    assert not [path for path in files if path.read_bytes().startswith(PICKLE_STARTS)]


def test_the_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    counted = {key: manifest[key] for key in ("episodes", "tokens", "decisions", "terminated", "truncated")}
    assert counted == {"episodes": 3, "tokens": 7 + 7 + 4, "decisions": 3 + 2 + 2, "terminated": 2, "truncated": 1}
    assert manifest["mean_return"] == -0.5
    assert (manifest["seed"], manifest["source"], manifest["row_length"]) == (7, "three of them", 12)
    assert set(manifest["created_by"]) == {"torchrl_lang", "tensordict", "torch"}


def test_indexing_gives_memory_of_its_own(folder):
    dataset = load_dataset(folder)
    dataset[0]["token_reward"].fill_(9.0)
    dataset[:2]["tokens"].zero_()
    assert len(load_dataset(folder, verify=True)) == 3  # the checksums still hold


def test_blocks_of_any_size_give_the_same_files(tmp_path, folder, rows):
    with DatasetWriter(tmp_path / "blocks", WORDS, 12, seed=7, source="three of them") as writer:
        writer.extend(rows[:0])
        writer.extend(rows[:2])
        writer.extend(rows[2:].set("extra", torch.zeros(1, 5)))
    for path in ("manifest.json", "tokenizer.json", "rows/meta.json", "rows/tokens.memmap", "rows/truncated.memmap"):
        assert (tmp_path / "blocks" / path).read_bytes() == (folder / path).read_bytes(), path


def test_a_failed_writer_leaves_nothing(tmp_path, rows):
    def write_and_fail():
        with DatasetWriter(tmp_path / "failed", WORDS, 12) as writer:
            writer.extend(rows)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="No episode was written"), DatasetWriter(tmp_path / "empty", WORDS, 12):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_unfinished_data_set_says_so(tmp_path, rows):
    ended = run("-c", KILLED, tmp_path / "data")
    assert ended.returncode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="was interrupted"):
        load_dataset(tmp_path / "data")
    write_dataset(tmp_path / "data", rows, WORDS)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_two_writers_do_not_mix(tmp_path, rows):
    """The second is told so and takes nothing from the first, whose data set is whole."""
    with DatasetWriter(tmp_path / "data", WORDS, 12) as writer:
        writer.extend(rows)
        with pytest.raises(FileExistsError, match=rf"Another process writes in {tmp_path}/data: wait"):  # noqa: SIM117
            with DatasetWriter(tmp_path / "data", WORDS, 12):
                pass
        writer.extend(rows)
    assert (load_dataset(tmp_path / "data", verify=True)[:] == torch.cat([rows, rows])).all()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_overwriting_is_asked_for(tmp_path, folder, rows):
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_dataset(folder, rows, WORDS)
    write_dataset(folder, rows[:1], WORDS, overwrite=True)
    assert len(load_dataset(folder, verify=True)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("do not delete")
    with pytest.raises(FileExistsError, match="something other"):
        write_dataset(tmp_path / "thesis", rows, WORDS, overwrite=True)


def test_rows_are_checked_on_the_way_in(tmp_path, rows):
    outside, padding, nan = rows.clone(), rows.clone(), rows.clone()
    outside["tokens"][0, 1] = WORDS.vocab_size
    padding["tokens"][0, -1] = -100
    nan["token_reward"][1, 6] = math.nan
    for bad, message in (
        (outside, "Row 0 has a token id out of range at position 1"),
        (padding, "Padding holds the id -100"),
        (nan, "Row 1 has a reward that is not finite at position 6"),
        (rows.exclude("truncated"), "need 'truncated', bool .*, got nothing"),
        (rows.clone().set("truncated", torch.zeros(3, 1)), "got torch.float32 of shape .3, 1."),
        (rows[0], r"takes rows \[M, 12\]"),
    ):
        with pytest.raises(ValueError, match=message), DatasetWriter(tmp_path / "bad", WORDS, 12) as writer:
            writer.extend(bad)
    with DatasetWriter(tmp_path / "good", WORDS, 12) as writer:
        writer.extend(rows)
        with pytest.raises(ValueError, match="Rows from number 3: Row 1 has a reward that is not finite"):
            writer.extend(nan)
    assert (load_dataset(tmp_path / "good")[:] == rows).all()  # nothing of the bad block was written


def test_a_missing_data_set(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"manifest\.json is missing"):
        load_dataset(tmp_path)


def change(path, old, new):
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "rows/tokens.memmap").unlink(), "tokens.memmap is missing"),
        (lambda f: (f / "rows/tokens.memmap").write_bytes(b"\0" * 143), "has 143 bytes, expected 144"),
        (lambda f: (f / "rows/tokens.memmap").write_bytes(b"\0" * 144), "was changed after it was written"),
        (lambda f: change(f / "rows/meta.json", "12", "6"), "meta.json was changed after it was written"),
        (lambda f: (f / "rows/meta.json").unlink(), "meta.json is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda f: change(f / "tokenizer.json", '"a"', '"z"'), "tokenizer.json was changed"),
        (lambda f: change(f / "manifest.json", '"version": 2', '"version": 3'), "reads versions up to 2"),
        (lambda f: change(f / "manifest.json", '"version": 2', '"version": 1'), "was changed after it was written"),
        (lambda f: change(f / "manifest.json", "three", "four"), "was changed after it was written"),
        (lambda f: change(f / "manifest.json", '"digest"', '"digets"'), 'has no field "digest"'),
        (lambda f: change(f / "manifest.json", "{", "["), "is not valid JSON"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not a JSON object"),
    ],
)
def test_damage_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_dataset(folder, verify=True)


def test_another_tokenizer_is_refused(folder):
    load_dataset(folder, tokenizer=CharTokenizer.from_alphabet("abc"))
    with pytest.raises(ValueError, match="its ids mean other text"):
        load_dataset(folder, tokenizer=CharTokenizer.from_alphabet("cab"))


class Own:
    """A tokenizer of one's own: a kind that the library does not know."""

    vocab_size, control = WORDS.vocab_size, WORDS.control

    def encode(self, text):
        return WORDS.encode(text)

    def decode(self, tokens):
        return WORDS.decode(tokens)

    def config(self):
        return {"kind": "own"}


def test_a_tokenizer_of_ones_own(rows, tmp_path):
    own = Own()
    dataset = write_dataset(tmp_path / "data", rows, own)
    assert dataset.tokenizer is own
    assert dataset.episode(0) == EPISODES[0]


def test_rows_without_tokens_are_told_so(rows, tmp_path):
    with pytest.raises(KeyError, match="A row needs 'tokens'"):
        write_dataset(tmp_path / "data", rows.exclude("tokens"), WORDS)
    with DatasetWriter(tmp_path / "data", WORDS, 12) as writer:
        writer.extend(rows)
        with pytest.raises(KeyError, match="A row needs 'tokens'"):
            writer.extend(rows.exclude("tokens"))
