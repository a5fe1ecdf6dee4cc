"""The floor of the training benchmarks: the plain language-model step."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

__all__ = ["plain_step"]


def plain_step(lm: torch.nn.Module, rows: TensorDictBase) -> None:
    """Hugging Face's loss on the padded rows, forward and backward."""
    labels = torch.where(rows["attention_mask"], rows["tokens"], -100)
    mask = rows["attention_mask"].long()
    lm(input_ids=rows["tokens"], attention_mask=mask, labels=labels, use_cache=False).loss.backward()
