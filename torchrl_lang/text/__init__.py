"""Text to token rows and back: tokenizers, chat templates, messages and episodes."""

from torchrl_lang.text.chat_template import RowFormat
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import Episode, TokenRewardTable, Turn, token_frequencies
from torchrl_lang.text.hf_tokenizer import HFTokenizer
from torchrl_lang.text.messages import from_messages, to_messages
from torchrl_lang.text.rows import TokenReward, from_row, to_row, to_rows
from torchrl_lang.text.tokenizer_files import tokenizer_from_config, transformers_tokenizer, write_tokenizer
from torchrl_lang.text.tokenizers import CharTokenizer, Tokenizer, fingerprint, word_tokenizer

__all__ = [
    "CharTokenizer",
    "ChatTokenizer",
    "Episode",
    "HFTokenizer",
    "RowFormat",
    "TokenReward",
    "TokenRewardTable",
    "Tokenizer",
    "Turn",
    "fingerprint",
    "from_messages",
    "from_row",
    "to_messages",
    "to_row",
    "to_rows",
    "token_frequencies",
    "tokenizer_from_config",
    "transformers_tokenizer",
    "word_tokenizer",
    "write_tokenizer",
]
