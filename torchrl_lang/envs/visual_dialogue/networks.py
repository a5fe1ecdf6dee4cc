"""The networks of visual dialogues: words and dialogues as tensors, an encoder, the image guesser, and the answerer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue

PAD, UNKNOWN, BEGIN, END = range(4)
"""Ids that are not words."""
MAX_WORDS = 40
"""Words of a caption, question or answer that the models read."""
LONGEST_ANSWER = 20
"""Words of an answer that they write."""

_SPECIAL = 4
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")
_TYPOGRAPHIC = str.maketrans({"\N{RIGHT SINGLE QUOTATION MARK}": "'", "\N{LEFT SINGLE QUOTATION MARK}": "'"})


def split_words(text: str) -> list[str]:
    """The lower-case words of a text; contractions and punctuation are words of their own."""
    return _WORD.findall(text.translate(_TYPOGRAPHIC).lower())


def join_words(words: Iterable[str]) -> str:
    """The text of words: contractions and punctuation follow the word before them without a space."""
    return re.sub(r" (?=n't(?: |$)|'|[?!.,;:](?: |$))", "", " ".join(words))


class WordIndex:
    """The ids of words; other words have the id of an unknown word.

    Args:
        words: the words, each once.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(self.words, start=_SPECIAL)}

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> WordIndex:
        """The words of some texts, the most frequent first."""
        counts = Counter(word for text in texts for word in split_words(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word)))

    def __len__(self) -> int:
        """Number of ids: the words and four others."""
        return len(self.words) + _SPECIAL

    def ids(self, texts: Sequence[str]) -> Tensor:
        """The ids of the first words of texts, int64 ``[N, L]``, right-padded to the longest of them, at least 1."""
        rows = [[self._ids.get(word, UNKNOWN) for word in split_words(text)[:MAX_WORDS]] for text in texts]
        width = max(map(len, rows), default=1) or 1
        return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.int64).view(-1, width)

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids up to the end; ids that are not words are left out."""
        until = list(ids)[: list(ids).index(END)] if END in ids else ids
        return join_words(self.words[each - _SPECIAL] for each in until if each >= _SPECIAL)


class DialogueBatch(NamedTuple):
    """Dialogues of different numbers of rounds, right-padded."""

    caption: Tensor
    """Int64 ``[N, L]``."""
    questions: Tensor
    """Int64 ``[N, R, L]``."""
    answers: Tensor
    """Int64 ``[N, R, L]``."""
    rounds: Tensor
    """Number of rounds, int64 ``[N]``."""

    @classmethod
    def of(cls, dialogues: Sequence[Dialogue], words: WordIndex) -> DialogueBatch:
        """The ids of dialogues."""
        rounds = torch.tensor([len(each.rounds) for each in dialogues], dtype=torch.int64)
        pairs = [each for dialogue in dialogues for each in dialogue.rounds]
        texts = [each.question for each in pairs], [each.answer for each in pairs]
        questions, answers = (_placed(words.ids(each), rounds) for each in texts)
        return cls(words.ids([each.caption for each in dialogues]), questions, answers, rounds)

    def to(self, device: torch.device | str) -> DialogueBatch:
        """The batch on a device."""
        return DialogueBatch(*(each.to(device) for each in self))

    def rows(self, index: Tensor) -> DialogueBatch:
        """Some of the dialogues."""
        return DialogueBatch(*(each[index] for each in self))


def with_begin_and_end(ids: Tensor) -> Tensor:
    """Right-padded ids ``[..., L]`` with the begin id in front and the end id behind, ``[..., L + 2]``."""
    wider = functional.pad(ids, (1, 1), value=PAD)
    wider[..., 0] = BEGIN
    return wider.scatter(-1, (ids != PAD).sum(-1, keepdim=True) + 1, END)


def _placed(ids: Tensor, rounds: Tensor) -> Tensor:
    """The ids ``[N, R, L]`` of texts ``[sum(rounds), L]`` in the order of dialogues and rounds."""
    most = int(rounds.max()) if len(rounds) else 0
    placed = torch.full((len(rounds), most, ids.shape[-1]), PAD)
    placed[torch.arange(most) < rounds[:, None]] = ids
    return placed


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

    def last(self, batch: DialogueBatch) -> Tensor:
        """The states after the last rounds, ``[N, H]``."""
        return self(batch)[torch.arange(len(batch.rounds), device=batch.rounds.device), batch.rounds]

    def _means(self, ids: Tensor) -> Tensor:
        """Mean embeddings ``[N, R, E]`` of texts ``[N, R, L]``."""
        return self.words(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])


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
        return self.feature(self.encoder.last(batch))

    def loss(self, batch: DialogueBatch, features: Tensor) -> Tensor:
        """Mean over dialogues and the rounds that they have of ``|p - f|^2``.

        Args:
            batch: N dialogues.
            features: of their images, ``[N, F]``.
        """
        error = (self(batch) - features[:, None]).square().sum(-1)  # [N, 1 + R]
        real = torch.arange(error.shape[1], device=error.device) <= batch.rounds[:, None]
        return error[real].mean()


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

    def loss(self, batch: DialogueBatch, features: Tensor) -> Tensor:
        """Mean cross entropy of the words of all answers, with the end; arguments as of :meth:`ImageGuesser.loss`."""
        real = torch.arange(batch.questions.shape[1], device=features.device) < batch.rounds[:, None]  # [N, R]
        history = self.encoder(batch)[:, :-1][real]  # before each question
        images = features[:, None].expand(-1, real.shape[1], -1)[real]
        answers = with_begin_and_end(batch.answers[real])
        logits = self(self.start(history, batch.questions[real], images), answers[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), answers[:, 1:].flatten(), ignore_index=PAD)

    def answer(self, start: Tensor) -> Tensor:
        """The most probable word at each place, int64 ``[N, L]``, with the end id; never an unknown word."""
        written = [torch.full((len(start),), BEGIN, device=start.device)]
        ended, state = torch.zeros(len(start), dtype=torch.bool, device=start.device), start[None]
        for _ in range(LONGEST_ANSWER):
            states, state = self.decoder(self.words(written[-1])[:, None], state)
            logits = self.logits(states[:, 0])
            logits[:, [PAD, UNKNOWN, BEGIN]] = -torch.inf
            written.append(logits.argmax(-1).masked_fill(ended, END))
            ended = ended | (written[-1] == END)
            if bool(ended.all()):
                break
        return torch.stack(written[1:], dim=-1)
