"""Recipes train on data sets that are as they were written."""

from __future__ import annotations

import json

import pytest

from torchrl_lang._files import FileError
from torchrl_lang.envs.wordle.task import WordleData
from torchrl_lang.recipes.datasets import main, open_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordle") / "data"
    main(WordleData(out=folder, games=20, words="20"))
    return folder


def test_a_whole_data_set_is_opened(data):
    dataset, task = open_dataset(data)
    assert len(dataset) == 20
    assert len(task.words) == 20


@pytest.mark.parametrize("name", ["tokens", "token_reward", "agent_mask"])
def test_rows_that_were_changed_are_refused(data, name):
    path = data / "rows" / f"{name}.memmap"
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    with pytest.raises(FileError, match="was changed after it was written"):
        open_dataset(data)
    path.write_bytes(content)
    open_dataset(data)


@pytest.mark.parametrize(("name", "field"), [("manifest.json", "notes"), ("tokenizer.json", "symbols")])
def test_words_and_symbols_that_were_changed_are_refused(data, name, field):
    path = data / name
    content = path.read_text()
    changed = json.loads(content)
    words = changed["notes"]["words"] if field == "notes" else changed["symbols"]
    words[0], words[1] = words[1], words[0]
    path.write_text(json.dumps(changed))
    with pytest.raises(FileError, match="was changed"):
        open_dataset(data)
    path.write_text(content)
    open_dataset(data)
