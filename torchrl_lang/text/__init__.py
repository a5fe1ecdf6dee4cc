"""Text to token rows and back: tokenizers, chat templates, messages and episodes."""

from torchrl_lang.text.chat_template import RowFormat
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import Episode, TokenRewardTable, Turn, token_frequencies
from torchrl_lang.text.hf_tokenizer import HFTokenizer
from torchrl_lang.text.messages import messages_from_history, to_messages
from torchrl_lang.text.rows import from_row, to_rows
from torchrl_lang.text.tokenizers import CharTokenizer, Tokenizer, word_tokenizer

__all__ = [
    "CharTokenizer",
    "ChatTokenizer",
    "Episode",
    "HFTokenizer",
    "RowFormat",
    "TokenRewardTable",
    "Tokenizer",
    "Turn",
    "from_row",
    "messages_from_history",
    "to_messages",
    "to_rows",
    "token_frequencies",
    "word_tokenizer",
]
