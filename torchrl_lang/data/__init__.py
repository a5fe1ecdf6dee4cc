"""Datasets on disk, replay buffers, and rollouts as rows."""

from torchrl_lang._files import FileError
from torchrl_lang.data.dataset import DatasetWriter, RowDataset, load_dataset, write_dataset
from torchrl_lang.data.generate import (
    FreshGames,
    GameMaker,
    PolicyGames,
    generate_dataset,
    generate_in_parts,
    play_to_end,
    seed_of_games,
)
from torchrl_lang.data.jsonl import (
    BadLine,
    DialogueReader,
    dataset_from_jsonl,
    dataset_from_records,
    parse_dialogue,
    read_jsonl,
)
from torchrl_lang.data.replay import BucketSampler, EpochSampler, TrimRows, row_buffer
from torchrl_lang.data.rollouts import EpisodeRows, rows_from_rollout
from torchrl_lang.data.samples import from_samples, rows_from_triples
from torchrl_lang.data.selection import BestRows, best_rows, row_returns
from torchrl_lang.text.rows import from_row, to_row, to_rows

__all__ = [
    "BadLine",
    "BestRows",
    "BucketSampler",
    "DatasetWriter",
    "DialogueReader",
    "EpisodeRows",
    "EpochSampler",
    "FileError",
    "FreshGames",
    "GameMaker",
    "PolicyGames",
    "RowDataset",
    "TrimRows",
    "best_rows",
    "dataset_from_jsonl",
    "dataset_from_records",
    "from_samples",
    "from_row",
    "generate_dataset",
    "generate_in_parts",
    "load_dataset",
    "parse_dialogue",
    "play_to_end",
    "read_jsonl",
    "row_buffer",
    "row_returns",
    "rows_from_rollout",
    "rows_from_triples",
    "seed_of_games",
    "to_row",
    "to_rows",
    "write_dataset",
]
