"""Entries beside those of a row: written where asked for, read with the rows, and checked like them."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict

from tests.data.test_dataset_damage import EPISODES, WORDS, edit
from torchrl_lang._files import FileError
from torchrl_lang.data import DatasetWriter, load_dataset, row_buffer, write_dataset
from torchrl_lang.text import to_rows

KEPT = ["kind", "train_mask", "scores"]


@pytest.fixture
def rows():
    rows = to_rows(EPISODES, WORDS, 12)
    rows["kind"] = torch.tensor([0, 2, 1])
    rows["train_mask"] = rows["agent_mask"].logical_not()
    rows["scores"] = torch.arange(12.0).view(3, 2, 2)
    rows["dropped"] = torch.ones(3, 1)
    return rows


@pytest.fixture
def folder(tmp_path, rows):
    notes = {"kinds": ["expert", "branch", "other"]}
    return write_dataset(tmp_path / "data", rows, WORDS, keep=KEPT, notes=notes).folder


def test_what_was_written_is_read(folder, rows):
    dataset = load_dataset(folder, verify=True)
    assert (dataset[:] == rows.exclude("dropped")).all()
    assert dataset.manifest["notes"]["kinds"][2] == "other"
    assert (TensorDict.load_memmap(folder / "rows", allow_pickle=False) == rows.exclude("dropped")).all()
    assert load_dataset(folder)[1]["kind"] == 2


def test_they_come_with_the_batches_and_masks_are_trimmed(folder):
    batch = row_buffer(load_dataset(folder), 3).sample()
    assert sorted(batch["kind"].tolist()) == [0, 1, 2]
    assert batch["train_mask"].shape == batch["tokens"].shape == (3, 7)


def test_datasets_without_them_are_written_as_before(tmp_path, rows):
    write_dataset(tmp_path / "data", rows, WORDS)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert set(manifest["entries"]) == {
        "tokens",
        "attention_mask",
        "agent_mask",
        "token_reward",
        "terminated",
        "truncated",
    }


@pytest.mark.parametrize("key", KEPT)
def test_a_changed_or_shortened_file_is_noticed(folder, key):
    path = folder / "rows" / f"{key}.memmap"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(FileError, match="checksum differs"):
        load_dataset(folder)
    path.write_bytes(data[:-1])
    with pytest.raises(FileError, match=f"has {len(data) - 1} bytes"):
        load_dataset(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m: m["entries"]["kind"].update(dtype="object"), "bool, int64 or float32"),
        (lambda m: m["entries"]["kind"].update(shape=[4]), "an entry of 3 rows"),
        (lambda m: m["entries"]["kind"].update(shape=[]), "an entry of 3 rows"),
        (lambda m: m["entries"].update({"../kind": m["entries"]["kind"]}), "ASCII letters"),
        (lambda m: m["entries"]["kind"].pop("sha256"), "sha256"),
    ],
)
def test_their_description_is_checked(folder, change, found):
    edit(folder, "manifest.json", change)
    with pytest.raises(FileError, match=found):
        load_dataset(folder)


def test_what_cannot_be_stored_is_refused(tmp_path, rows):
    folder = tmp_path / "data"
    for change, keep, found in [
        ({"kind": rows["kind"].double()}, "kind", r"is torch\.float64: further entries"),
        ({}, "a/b", "cannot be the name"),
    ]:
        with pytest.raises(ValueError, match=found):
            write_dataset(folder, rows.clone().update(change), WORDS, keep=[keep])
    with pytest.raises(KeyError, match="missing"):
        write_dataset(folder, rows, WORDS, keep=["missing"])
    with DatasetWriter(folder, WORDS, 12, keep=["kind"]) as writer:
        writer.extend(rows)
        with pytest.raises(ValueError, match=r"shape \[2\] in these rows, but torch\.int64 of shape \[\] in the rows"):
            writer.extend(rows.clone().set("kind", torch.zeros(3, 2, dtype=torch.int64)))
    assert len(load_dataset(folder)) == 3


def with_features(rows, width=2):
    generator = torch.Generator().manual_seed(0)
    return rows.update(
        {"features": torch.randn(3, 4, width, generator=generator), "features_mask": torch.eye(3, 4, dtype=torch.bool)}
    )


@pytest.mark.parametrize("keep", [[], ["kind"], ["features"]])
def test_features_are_kept_unasked(tmp_path, rows, keep):
    dataset = write_dataset(tmp_path / "data", with_features(rows), WORDS, keep=keep)
    assert torch.equal(dataset[:]["features"], rows["features"])
    assert torch.equal(dataset[:]["features_mask"], rows["features_mask"])
    assert ("kind" in dataset.rows.keys()) == ("kind" in keep)
    assert load_dataset(tmp_path / "data", verify=True).rows["features"].dtype == torch.float32


def test_all_blocks_have_features_or_none(tmp_path, rows):
    plain = rows.clone()
    with DatasetWriter(tmp_path / "data", WORDS, 12) as writer:
        writer.extend(with_features(rows))
        with pytest.raises(KeyError, match="features"):
            writer.extend(plain)
        with pytest.raises(ValueError, match=r"'features' is torch.float32 of shape"):
            writer.extend(with_features(rows.clone(), width=5))
        writer.extend(rows[:1])
    dataset = load_dataset(tmp_path / "data", verify=True)
    assert torch.equal(dataset.rows["features"], torch.cat([rows["features"], rows["features"][:1]]))
    with DatasetWriter(tmp_path / "other", WORDS, 12) as writer:
        writer.extend(plain)
        with pytest.raises(
            ValueError, match=r"These rows have \['features', 'features_mask'\], but the rows before had none"
        ):
            writer.extend(rows)
    assert "features" not in load_dataset(tmp_path / "other", verify=True).rows.keys()


def test_features_of_another_dtype_are_refused(tmp_path, rows):
    rows["features"] = torch.zeros(3, 4, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'features' is torch.float16: further entries of a dataset are bool"):
        write_dataset(tmp_path / "data", rows, WORDS)
    assert not (tmp_path / "data").exists()
