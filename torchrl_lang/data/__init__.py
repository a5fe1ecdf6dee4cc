"""Text and rows: tokenizers, episodes, data sets on disk, replay buffers."""

from torchrl_lang.data.tokenizers import CharTokenizer, Tokenizer

__all__ = ["CharTokenizer", "Tokenizer"]
