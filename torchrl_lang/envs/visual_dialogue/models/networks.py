"""The networks of visual dialogues: an encoder of dialogues, the image guesser, and the answerer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang._checks import have_shapes
from torchrl_lang.envs.visual_dialogue.models.words import BEGIN, END, PAD, UNKNOWN, DialogueBatch

__all__ = [
    "Answerer",
    "DialogueEncoder",
    "ImageGuesser",
    "WHITENED",
    "Whitening",
    "after_last_round",
    "rank_percentile",
    "squared_distances",
]


class DialogueEncoder(nn.Module):
    """A vector for the caption and one for each round, read by a GRU (the hierarchy of arXiv 1611.08669, section 4.1).

    The vector of a text is the mean of the embeddings of its words. A round's is a function of the vectors ``q`` and
    ``a`` of question and answer and of the product ``q * a``, by which a "yes" confirms what the question names.
    Padding is not read: a dialogue's states do not depend on the batch.

    Args:
        vocab_size: number of word ids.
        width: of the states, ``H``.
        embedding: of the embeddings of words.
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


_TIE = 1e-6


class ImageGuesser(nn.Module):
    """Predicts the L2-normalised feature of an image after the caption and after each round.

    Args:
        vocab_size: number of word ids.
        feature_size: ``F``.
        width: of the states.
        embedding: of the embeddings of words.
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
    """The states ``[N, H]`` after the last round, from those after each round, ``[N, 1 + R, H]``."""
    return states[torch.arange(len(states), device=states.device), rounds]


def squared_distances(predicted: Tensor, images: Tensor, sizes: Tensor | None = None) -> Tensor:
    """``|p - f|^2`` for each prediction ``[N, F]`` and image ``[P, F]``, ``[N, P]``; ``sizes``: ``|f|^2``, ``[P]``."""
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
    """
    distances = squared_distances(predicted, pool, sizes)
    own = (predicted - true).square().sum(-1, keepdim=True)
    nearer = (distances < own - _TIE).sum(-1)
    return 1 - (1 + nearer).to(predicted.dtype) / (len(pool) + 1)


WHITENED = 4096
"""Images whose features are enough to find the components."""

_FLOOR = 0.05


class Whitening(nn.Module):
    """The principal components of image features, divided by their standard deviations.

    A few directions of image features vary far more than all others, which a network would be slow to use.
    Components with less than a twentieth of the largest deviation are divided by that much, since they are noise.

    Args:
        feature_size: ``F``.
        components: how many to keep, at most ``F``.
    """

    def __init__(self, feature_size: int, components: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.directions: Tensor
        self.register_buffer("mean", torch.zeros(feature_size))
        self.register_buffer("directions", torch.eye(feature_size, min(components, feature_size)))

    def fit(self, features: Tensor) -> None:
        """Set the components to those of some features, ``[N, F]``."""
        have_shapes(("features", features, (len(features), len(self.mean))))
        sample = features.to(self.mean)
        self.mean.copy_(sample.mean(0))
        many = min(self.directions.shape[1], len(sample))
        _, size, directions = torch.pca_lowrank(sample, many, niter=4)
        deviation = (size / len(sample) ** 0.5).clamp_min(float(size[0]) / len(sample) ** 0.5 * _FLOOR)
        self.directions.zero_()
        self.directions[:, :many] = directions / deviation

    def forward(self, features: Tensor) -> Tensor:
        """Components ``[N, C]`` of features ``[N, F]``."""
        return (features - self.mean) @ self.directions


_COMPONENTS = 128
_FORMS = 16


class Answerer(nn.Module):
    """A GRU that writes the words of an answer, given question, image feature and the dialogue so far.

    Its first state is a function of vectors ``q``, ``i`` and ``h`` of question, image and dialogue, of the products
    ``q * i``, which choose what the question asks about, and of bilinear forms ``b' M_k f`` of the mean word embedding
    ``b`` of the question and the feature ``f``, which show whether the image has what a yes-or-no question names.

    Args:
        vocab_size: number of word ids.
        feature_size: ``F``.
        width: of the states, ``H``.
        embedding: of the embeddings of words, ``E``.
    """

    def __init__(self, vocab_size: int, feature_size: int, *, width: int = 128, embedding: int = 64) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"feature_size": feature_size, "width": width, "embedding": embedding}
        self.encoder = DialogueEncoder(vocab_size, width=width, embedding=embedding)
        self.components = Whitening(feature_size, _COMPONENTS)
        components = self.components.directions.shape[1]
        self.asked_words = nn.LayerNorm(embedding)
        self.question = nn.Sequential(nn.Linear(embedding, width), nn.ReLU(), nn.Linear(width, width))
        self.image = nn.Linear(components, width)
        self.forms = nn.Linear(components, _FORMS * embedding)
        self.fused = nn.LayerNorm(4 * width)
        self.first = nn.Sequential(nn.Linear(4 * width + _FORMS, width), nn.ReLU(), nn.Linear(width, width))
        self.words = nn.Embedding(vocab_size, embedding, padding_idx=PAD)
        self.decoder = nn.GRU(embedding, width, batch_first=True)
        self.logits = nn.Linear(width, vocab_size)

    def start(self, history: Tensor, question: Tensor, features: Tensor) -> Tensor:
        """The decoder's first state ``[N, H]``.

        Args:
            history: the dialogue's state before the question, ``[N, H]``.
            question: word ids, int64 ``[N, L]``.
            features: ``[N, F]``, L2-normalised.
        """
        seen, asked_words = self.components(features), self.asked_words(self.encoder.words(question))
        asked, image = self.question(asked_words), self.image(seen)
        forms = self.forms(seen).unflatten(-1, (_FORMS, -1)) @ asked_words[:, :, None]  # [N, forms, 1]
        fused = self.fused(torch.cat([asked, image, asked * image, history], dim=-1))
        return self.first(torch.cat([fused, forms.squeeze(-1) / asked_words.shape[-1] ** 0.5], dim=-1))

    def forward(self, start: Tensor, answer: Tensor) -> Tensor:
        """Logits ``[N, L, V]`` of the word after each word of an answer ``[N, L]`` that begins with the begin id."""
        return self.logits(self.decoder(self.words(answer), start[None])[0])

    def answer(self, start: Tensor, *, max_words: int = 20) -> Tensor:
        """The most probable word at each place, int64 ``[N, L]``, with the end id; never an unknown word."""
        written = [torch.full((len(start),), BEGIN, device=start.device)]
        ended, state = torch.zeros(len(start), dtype=torch.bool, device=start.device), start[None]
        for _ in range(max_words):
            states, state = self.decoder(self.words(written[-1])[:, None], state)
            logits = self.logits(states[:, 0])
            logits[:, [PAD, UNKNOWN, BEGIN]] = -torch.inf
            written.append(logits.argmax(-1).masked_fill(ended, END))
            ended = ended | (written[-1] == END)
            if bool(ended.all()):
                break
        return torch.stack(written[1:], dim=-1)
