"""Tokenizers, episodes, rows, datasets on disk, and replay buffers."""

from torchrl_lang.data.chat_tokenizer import ChatTokenizer
from torchrl_lang.data.conversion import from_row, to_row, to_rows
from torchrl_lang.data.dataset_writer import DatasetWriter, write_dataset
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.dialogue_records import DialogueReader, parse_dialogue
from torchrl_lang.data.encoded_episode import TokenReward
from torchrl_lang.data.episode_rows import EpisodeRows
from torchrl_lang.data.episodes import Episode, Turn
from torchrl_lang.data.generate import generate_dataset
from torchrl_lang.data.hf_tokenizer import HFTokenizer
from torchrl_lang.data.json_lines import BadLine
from torchrl_lang.data.jsonl import dataset_from_jsonl, dataset_from_records, read_jsonl
from torchrl_lang.data.makers import (
    FreshGames,
    GameMaker,
    PolicyGames,
    generate_in_parts,
    play_to_end,
    seed_of_games,
)
from torchrl_lang.data.messages import from_messages, to_messages
from torchrl_lang.data.replay import TrimRows, row_buffer
from torchrl_lang.data.rollouts import rows_from_rollout
from torchrl_lang.data.row_format import RowFormat
from torchrl_lang.data.samplers import BucketSampler, EpochSampler
from torchrl_lang.data.samples import from_samples
from torchrl_lang.data.selection import BestRows, best_rows, row_returns
from torchrl_lang.data.token_reward_table import TokenRewardTable, token_frequencies
from torchrl_lang.data.tokenizer_config import tokenizer_from_config
from torchrl_lang.data.tokenizers import CharTokenizer, Tokenizer, fingerprint
from torchrl_lang.data.transformers_tokenizer import transformers_tokenizer, write_tokenizer
from torchrl_lang.data.triples import rows_from_triples
from torchrl_lang.data.word_tokenizer import word_tokenizer

__all__ = [
    "BadLine",
    "BestRows",
    "BucketSampler",
    "CharTokenizer",
    "ChatTokenizer",
    "DatasetWriter",
    "DialogueReader",
    "Episode",
    "EpisodeRows",
    "EpochSampler",
    "FreshGames",
    "GameMaker",
    "HFTokenizer",
    "PolicyGames",
    "RowDataset",
    "RowFormat",
    "TokenReward",
    "TokenRewardTable",
    "Tokenizer",
    "TrimRows",
    "Turn",
    "best_rows",
    "dataset_from_jsonl",
    "dataset_from_records",
    "fingerprint",
    "from_messages",
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
    "to_messages",
    "to_row",
    "to_rows",
    "token_frequencies",
    "tokenizer_from_config",
    "transformers_tokenizer",
    "word_tokenizer",
    "write_dataset",
    "write_tokenizer",
]
