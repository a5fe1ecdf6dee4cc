"""One dataset for both tasks in both formats."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from torchrl_lang.algorithm_distillation import HistoryWindows
from torchrl_lang.algorithm_distillation.language import (
    BlockTemplate,
    HistoryDataset,
    Quantizer,
    StepRows,
    StepTemplate,
    TextRecord,
    pack_blocks,
    template_tokenizer,
)
from torchrl_lang.text import word_tokenizer

TEMPLATE = StepTemplate("spelled", [Quantizer(range(3))] * 2, Quantizer(range(5), list("snSwe")), Quantizer([0, 1]))
TOKENIZER = template_tokenizer(TEMPLATE)
BLOCKS = BlockTemplate()
LETTERS = word_tokenizer([], symbols=BLOCKS.vocabulary())
RECORDS = [TextRecord(query=f"q{n}", response=f"r{n}", reward=n / 8, epoch=n) for n in range(9)]


def test_items_are_windows_or_packed_blocks(history):
    options = {"tasks": [2, 7], "at_episode_start": True}
    steps = HistoryDataset(history, "rl", 12, **options)
    rows = HistoryDataset(history, "language", 12, template=TEMPLATE, tokenizer=TOKENIZER, **options)
    windows = HistoryWindows(history, 12, **options)
    assert len(steps) == len(rows) == len(windows)
    every = history.flat[windows.steps_of(torch.arange(len(windows)))]
    assert (steps[range(len(steps))] == every).all()
    expected = StepRows(TEMPLATE, TOKENIZER)(every)
    assert (rows[range(len(rows))] == expected).all()
    assert (rows[-1] == expected[-1]).all()
    blocks = HistoryDataset(RECORDS, "language", 100, template=BLOCKS, tokenizer=LETTERS, loss_on="all")
    assert (blocks[range(len(blocks))] == pack_blocks(RECORDS, BLOCKS, LETTERS, 100, loss_on="all").rows).all()


def test_batches_of_a_loader(history):
    rows = HistoryDataset(history, "language", 12, template=TEMPLATE, tokenizer=TOKENIZER)
    loader = DataLoader(rows, batch_size=32, collate_fn=HistoryDataset.collate)
    together = torch.cat(list(loader))
    assert (together == rows[range(len(rows))]).all()
    assert (pickle.loads(pickle.dumps(rows))[3] == rows[3]).all()  # noqa: S301  as workers get it
    alone = DataLoader(rows, batch_size=None, collate_fn=HistoryDataset.collate)
    assert (next(iter(alone)) == rows[0]).all()
    assert (HistoryDataset.collate([rows[0], rows[1]]) == rows[[0, 1]]).all()


def test_wrong_options_raise(history):
    with pytest.raises(ValueError, match="format must be one of"):
        HistoryDataset(history, "text", 12)
    for given, format, options in ((RECORDS, "rl", {}), (history, "rl", {"template": 1}), (history, "language", {})):
        with pytest.raises(TypeError, match="A template and a tokenizer are for the language format"):
            HistoryDataset(given, format, 12, **options)
    rows = HistoryDataset(history, "rl", 12)
    with pytest.raises(IndexError):
        rows[len(rows)]
