"""The state of a dialogue after its caption and after each round, from a recurrent network over rounds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrl_lang.envs.visual_dialogue.models.batch import DialogueBatch
from torchrl_lang.envs.visual_dialogue.models.words import PAD

__all__ = ["DialogueEncoder"]


class DialogueEncoder(nn.Module):
    """A vector for the caption and one for each round, read by a GRU (the hierarchy of arXiv 1611.08669, section 4.1).

    The vector of a text is the mean of the embeddings of its words. A round's is a function of the vectors ``q`` and
    ``a`` of question and answer and of the product ``q * a``, by which a "yes" confirms what the question names.
    Padding is not read: a dialogue's states do not depend on the batch.

    Args:
        vocab_size: number of word ids.
        width: of the states, ``H``.
        embedding: of the embeddings of words.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue
        >>> from torchrl_lang.envs.visual_dialogue.models import DialogueBatch, DialogueEncoder, WordIndex
        >>> words = WordIndex.of_texts(["a dog"])
        >>> batch = DialogueBatch.of([Dialogue("a dog"), Dialogue("a red dog")], words)
        >>> DialogueEncoder(len(words), width=16)(batch).shape
        torch.Size([2, 1, 16])
    """

    def __init__(self, vocab_size: int, *, width: int = 128, embedding: int = 64) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(vocab_size, embedding, mode="mean", padding_idx=PAD)
        self.caption = nn.Sequential(nn.Linear(embedding, width), nn.Tanh())
        self.question = nn.Sequential(nn.LayerNorm(embedding), nn.Linear(embedding, width))
        self.answer = nn.Sequential(nn.LayerNorm(embedding), nn.Linear(embedding, width))
        self.round = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, batch: DialogueBatch) -> Tensor:
        """The states after the caption and after each round, ``[N, 1 + R, H]``; those after padding mean nothing."""
        caption = self.caption(self.words(batch.caption))[:, None]
        if not batch.questions.shape[1]:
            return self.gru(caption)[0]
        asked, answered = self.question(self._means(batch.questions)), self.answer(self._means(batch.answers))
        rounds = self.round(torch.cat([asked, answered, asked * answered], dim=-1))
        return self.gru(torch.cat([caption, rounds], dim=1))[0]

    def _means(self, ids: Tensor) -> Tensor:
        """Mean embeddings ``[N, R, E]`` of texts ``[N, R, L]``."""
        return self.words(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])
