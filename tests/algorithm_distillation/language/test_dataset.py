"""One dataset for both tasks in both formats."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from tests.algorithm_distillation.conftest import source
from torchrl_lang.algorithm_distillation import HistoryWindows, LearningHistory
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


@pytest.fixture
def learning():
    made = source("once")
    return LearningHistory(made.history(), made.tasks)


def test_windows_of_both_formats_are_the_same_steps(learning):
    options = {"tasks": [2, 7], "at_episode_start": True}
    steps = HistoryDataset(learning, "rl", 12, **options)
    rows = HistoryDataset(learning, "language", 12, template=TEMPLATE, tokenizer=TOKENIZER, **options)
    windows = HistoryWindows(learning, 12, **options)
    assert len(steps) == len(rows) == len(windows)
    every = steps[range(len(steps))]
    assert torch.equal(every["observation"], learning.flat[windows.steps_of(torch.arange(len(windows)))]["observation"])
    assert (every["episode_step"][:, 0] == 0).all()
    expected = StepRows(TEMPLATE, TOKENIZER)(every)
    assert (rows[range(len(rows))] == expected).all()
    assert (rows[-1] == expected[-1]).all()


def test_records_of_text_tasks():
    blocks = HistoryDataset(RECORDS, "language", 100, template=BLOCKS, tokenizer=LETTERS, loss_on="all")
    assert (blocks[range(len(blocks))] == pack_blocks(RECORDS, BLOCKS, LETTERS, 100, loss_on="all").rows).all()


def test_batches_of_a_loader(learning):
    rows = HistoryDataset(learning, "language", 12, template=TEMPLATE, tokenizer=TOKENIZER)
    loader = DataLoader(rows, batch_size=32, collate_fn=HistoryDataset.collate)
    together = torch.cat(list(loader))
    assert (together == rows[range(len(rows))]).all()
    assert (pickle.loads(pickle.dumps(rows))[3] == rows[3]).all()  # noqa: S301  as workers get it
    alone = DataLoader(rows, batch_size=None, collate_fn=HistoryDataset.collate)
    assert (next(iter(alone)) == rows[0]).all()
    assert (HistoryDataset.collate([rows[0], rows[1]]) == rows[[0, 1]]).all()


def test_wrong_options_raise(learning):
    with pytest.raises(ValueError, match=r"format must be one of .*, got 'text'"):
        HistoryDataset(learning, "text", 12)
    for history, format, options in (
        (RECORDS, "rl", {}),
        (learning, "rl", {"template": TEMPLATE}),
        (learning, "language", {}),
    ):
        with pytest.raises(TypeError, match="A template and a tokenizer are for the language format"):
            HistoryDataset(history, format, 12, **options)
    rows = HistoryDataset(learning, "rl", 12)
    with pytest.raises(IndexError):
        rows[len(rows)]
