"""Texts as batches of tokens for Hugging Face encoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["encoded_batches", "readable_tokens"]


def encoded_batches(tokenizer: Any, texts: Sequence[str], batch_size: int, max_length: int) -> Iterator[Any]:
    """The texts in order, tokenized in batches, padded to the longest of each, and cut at ``max_length`` tokens.

    A text without tokens, such as ``""`` for a tokenizer that adds no special ones, is read as one padding token.

    Args:
        tokenizer: a Hugging Face tokenizer with a padding token.
        texts: the texts.
        batch_size: texts in a batch.
        max_length: tokens of a text, at most; see :func:`readable_tokens`.

    Yields:
        Batches with ``input_ids`` and ``attention_mask`` int64 ``[n, L]``.
    """
    for first in range(0, len(texts), batch_size):
        part = [text.encode("utf-8", "replace").decode() for text in texts[first : first + batch_size]]  # surrogates
        batch = tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        if not batch["input_ids"].numel():
            token = torch.full((len(part), 1), tokenizer.pad_token_id)
            batch = type(batch)({"input_ids": token, "attention_mask": torch.zeros_like(token)})
        mask = batch["attention_mask"]
        mask[:, 0] |= ~mask.any(-1)  # attention over nothing is undefined
        yield batch


def readable_tokens(model: Any, tokenizer: Any) -> int:
    """The tokens of the longest text that a model reads.

    Args:
        model: a Hugging Face model.
        tokenizer: its tokenizer, which need not know the length.
    """
    known: int = tokenizer.model_max_length
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    if positions < 1 or not getattr(model.config, "position_biased_input", True):  # XLNet; DeBERTa
        return known  # its positions are relative
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)  # RoBERTa counts positions from the one after that of padding
    return min(known, positions - (0 if padding is None else padding + 1))
