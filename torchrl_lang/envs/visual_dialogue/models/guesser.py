"""The image guesser: predicts the feature of an image from a dialogue about it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.envs.visual_dialogue.models.batch import DialogueBatch
from torchrl_lang.envs.visual_dialogue.models.encoder import DialogueEncoder

__all__ = ["ImageGuesser", "after_last_round", "rank_percentile", "squared_distances"]

_TIE = 1e-6


class ImageGuesser(nn.Module):
    """Predicts the L2-normalised feature of an image after the caption and after each round.

    Args:
        vocab_size: number of word ids.
        feature_size: ``F``.
        width: of the states.
        embedding: of the embeddings of words.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue
        >>> from torchrl_lang.envs.visual_dialogue.models import DialogueBatch, ImageGuesser, WordIndex
        >>> words = WordIndex.of_texts(["a dog"])
        >>> ImageGuesser(len(words), 64)(DialogueBatch.of([Dialogue("a dog")], words)).shape
        torch.Size([1, 1, 64])
    """

    def __init__(self, vocab_size: int, feature_size: int, *, width: int = 128, embedding: int = 64) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"feature_size": feature_size, "width": width, "embedding": embedding}
        self.encoder = DialogueEncoder(vocab_size, width=width, embedding=embedding)
        self.feature = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, feature_size))

    def forward(self, batch: DialogueBatch) -> Tensor:
        """Predicted features ``[N, 1 + R, F]``."""
        return self.feature(self.encoder(batch))

    def predict(self, batch: DialogueBatch) -> Tensor:
        """The feature predicted after the last round, ``[N, F]``."""
        return self.feature(after_last_round(self.encoder(batch), batch.rounds))


def after_last_round(states: Tensor, rounds: Tensor) -> Tensor:
    """The states ``[N, H]`` after the last round, from those after each round, ``[N, 1 + R, H]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue.models.guesser import after_last_round
        >>> after_last_round(torch.tensor([[[1], [2], [3]], [[4], [5], [6]]]), torch.tensor([2, 0])).flatten()
        tensor([3, 4])
    """
    return states[torch.arange(len(states), device=states.device), rounds]


def squared_distances(predicted: Tensor, images: Tensor, sizes: Tensor | None = None) -> Tensor:
    """``|p - f|^2`` for each prediction ``[N, F]`` and image ``[P, F]``, ``[N, P]``; ``sizes``: ``|f|^2``, ``[P]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue.models.guesser import squared_distances
        >>> squared_distances(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 2.0]]))
        tensor([[2., 4.]])
    """
    sizes = images.square().sum(-1) if sizes is None else sizes
    return predicted.square().sum(-1, keepdim=True) - 2 * predicted @ images.T + sizes


def rank_percentile(predicted: Tensor, true: Tensor, pool: Tensor, sizes: Tensor | None = None) -> Tensor:
    """``1 - rank / (P + 1)`` of the true image among it and the pool, ``[N]``; the nearest image has rank 1.

    As the server of the ILQL paper (arXiv 2206.11871) does, the true image counts beside the pool, also where the pool
    has it, too. The rank counts the images of the pool that are nearer than the true one by more than 1e-6 (rounding
    may place its copy a little nearer), and the true one.

    Args:
        predicted: ``[N, F]``.
        true: features of the true images, ``[N, F]``.
        pool: features of all images, ``[P, F]``.
        sizes: the squared lengths of the pool's features, ``[P]``, where they are at hand.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue.models import rank_percentile
        >>> pool = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
        >>> rank_percentile(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), pool[[0, 1]], pool)
        tensor([0.8000, 0.6000])
    """
    distances = squared_distances(predicted, pool, sizes)
    own = (predicted - true).square().sum(-1, keepdim=True)
    nearer = (distances < own - _TIE).sum(-1)
    return 1 - (1 + nearer).to(predicted.dtype) / (len(pool) + 1)
