"""Datasets on disk, replay buffers, and rollouts as rows."""

from torchrl_lang._files import FileError
from torchrl_lang.data.chat import chat_from_rows, rows_from_chat
from torchrl_lang.data.dataset import DatasetWriter, RowDataset, load_dataset, write_dataset
from torchrl_lang.data.generate import FreshEpisodes, PolicySampler, generate_dataset, generate_in_parts
from torchrl_lang.data.jsonl import DialogueReader, dataset_from_jsonl, dataset_from_records
from torchrl_lang.data.replay import TrimRows, row_buffer
from torchrl_lang.data.rollouts import EpisodeRows, rows_from_rollout
from torchrl_lang.data.samples import from_samples, rows_from_triples
from torchrl_lang.data.selection import BestRows, LatestRows, best_rows, preference_pairs, row_returns

__all__ = [
    "BestRows",
    "DatasetWriter",
    "DialogueReader",
    "EpisodeRows",
    "FileError",
    "FreshEpisodes",
    "LatestRows",
    "PolicySampler",
    "RowDataset",
    "TrimRows",
    "best_rows",
    "chat_from_rows",
    "dataset_from_jsonl",
    "dataset_from_records",
    "from_samples",
    "generate_dataset",
    "generate_in_parts",
    "load_dataset",
    "preference_pairs",
    "row_buffer",
    "row_returns",
    "rows_from_chat",
    "rows_from_rollout",
    "rows_from_triples",
    "write_dataset",
]
