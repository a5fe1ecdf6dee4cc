"""The answerer: answers a question about an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.envs.visual_dialogue.models.encoder import DialogueEncoder
from torchrl_lang.envs.visual_dialogue.models.whitening import Whitening
from torchrl_lang.envs.visual_dialogue.models.words import BEGIN, END, PAD, UNKNOWN

__all__ = ["Answerer"]

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

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue
        >>> from torchrl_lang.envs.visual_dialogue.models import Answerer, DialogueBatch, WordIndex
        >>> words = WordIndex.of_texts(["a dog is red"])
        >>> answerer, batch = Answerer(len(words), 64), DialogueBatch.of([Dialogue("a dog")], words)
        >>> start = answerer.start(answerer.encoder(batch)[:, -1], words.ids(["is it red"]), torch.randn(1, 64))
        >>> answerer.answer(start, max_words=3).shape[0]
        1
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
