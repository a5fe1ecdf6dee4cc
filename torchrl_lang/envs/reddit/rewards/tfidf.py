"""Logistic regression on TF-IDF features of words: a small model of what a text is."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from torchrl_lang._checks import at_least_one, positive
from torchrl_lang._files import FileError, FolderFormat, read_tensors
from torchrl_lang.envs.reddit.rewards.probability import ProbabilityReward

__all__ = ["TfidfModel", "train_tfidf_model"]

_WEIGHTS, _REMEDY = "weights.safetensors", "train and save the model again"
_FORMAT = FolderFormat("tfidf.json", (_WEIGHTS,), remedy=_REMEDY, version=1)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


class TfidfModel(ProbabilityReward):
    """``sigmoid(w . x + b)`` of the TF-IDF features ``x`` of a text.

    The feature of a term (one word or several that follow each other) that occurs ``c`` times is
    ``(1 + log c) * idf``, and ``x`` has length 1. Train it with :func:`train_tfidf_model`.

    Args:
        terms: the terms that count, V of them.
        idf: their inverse document frequencies, float ``[V]``.
        weight: ``w``, float ``[V]``.
        bias: ``b``.
        words: the longest term has this number of words.
        threshold: see :class:`ProbabilityReward`.

    Raises:
        ValueError: a term occurs twice, or the numbers of items differ.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import TfidfModel
        >>> model = TfidfModel(["so what"], torch.ones(1), torch.tensor([-2.0]), 0.0, words=2, threshold=None)
        >>> model(["well done", "so what?"])
        tensor([0.5000, 0.1192])
    """

    def __init__(
        self,
        terms: Sequence[str],
        idf: Tensor,
        weight: Tensor,
        bias: float,
        *,
        words: int = 2,
        threshold: float | None = 0.5,
    ) -> None:
        super().__init__(threshold)
        at_least_one("words", words)
        if not len(set(terms)) == len(terms) == len(idf) == len(weight):
            raise ValueError(
                f"Each term needs one idf and one weight, got {len(set(terms))} different terms of {len(terms)}, "
                f"{len(idf)} idf and {len(weight)} weights."
            )
        self.terms, self.words = list(terms), words
        self.idf, self.weight, self.bias = idf.float(), weight.float(), float(bias)
        self._places = {term: place for place, term in enumerate(self.terms)}

    def _probabilities(self, texts: list[str]) -> Tensor:
        bags = _Bags(texts, self._places, self.idf, self.words)
        return (bags.times(self.weight) + self.bias).sigmoid()

    def save(self, folder: str | Path) -> None:
        """Save the numbers as safetensors and the terms as JSON into a new folder, atomically.

        Raises:
            FileExistsError: the folder exists and is not empty.
        """
        config = {"terms": self.terms, "words": self.words, "threshold": self.threshold}
        with _FORMAT.write(folder, config) as target:
            tensors = {"idf": self.idf, "weight": self.weight, "bias": torch.tensor([self.bias])}
            save_file(tensors, target / _WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path) -> TfidfModel:
        """Load what :meth:`save` saved.

        Raises:
            FileError: a file is missing, damaged or does not fit the other.
        """
        folder, config = Path(folder), _FORMAT.read(folder)
        tensors = read_tensors(folder / _WEIGHTS, remedy=_REMEDY)
        threshold = config.take("threshold", float, None)
        terms, words = config.list_of("terms", str), config.at_least("words", 1)
        shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        expected = {"idf": (len(terms),), "weight": (len(terms),), "bias": (1,)}
        if shapes != expected:
            raise FileError(folder / _WEIGHTS, f"holds tensors of shapes {shapes}, expected {expected}", _REMEDY)
        try:
            bias = float(tensors["bias"])
            return cls(terms, tensors["idf"], tensors["weight"], bias, words=words, threshold=threshold)
        except ValueError as error:
            raise config.error(f"describes no model ({error})") from error


def train_tfidf_model(
    texts: Sequence[str],
    labels: Sequence[bool],
    *,
    words: int = 2,
    least_count: int = 2,
    most_terms: int = 50_000,
    penalty: float = 1e-4,
    steps: int = 100,
    threshold: float | None = 0.5,
) -> TfidfModel:
    """Fit the model by L-BFGS to the mean binary cross entropy plus ``penalty / 2 * |w|^2``.

    The inverse document frequency of a term that occurs in ``n_t`` of ``N`` texts is
    ``log((1 + N) / (1 + n_t)) + 1``.

    Args:
        texts: to train on.
        labels: True for the texts of probability 1.
        words: the longest term has this number of words.
        least_count: terms in fewer texts do not count.
        most_terms: at most this number of the most frequent ones count.
        penalty: of large weights.
        steps: iterations, at most.
        threshold: of the model.

    Raises:
        ValueError: the labels are not those of the texts or all alike, no term counts, or a number is out of range.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import train_tfidf_model
        >>> model = train_tfidf_model(["well done", "so well", "so what", "what a pity"], [True, True, False, False])
        >>> model(["very well", "what now"])
        tensor([1., 0.])
    """
    for name, number in (("words", words), ("least_count", least_count), ("most_terms", most_terms), ("steps", steps)):
        at_least_one(name, number)
    positive("penalty", penalty)
    if len(texts) != len(labels):
        raise ValueError(f"Training needs a label for each text, got {len(labels)} labels for {len(texts)} texts.")
    if len(set(labels)) != 2:
        raise ValueError(f"Training needs texts of both labels, but all {len(texts)} texts have the same one.")
    counts = Counter(term for text in texts for term in set(_terms(text, words)))
    ranked = sorted((-count, term) for term, count in counts.items() if count >= least_count)[:most_terms]
    if not ranked:
        raise ValueError(f"No term occurs in least_count={least_count} of the {len(texts)} texts.")
    terms = [term for _, term in ranked]
    idf = torch.tensor([math.log((1 + len(texts)) / (1 - minus)) + 1 for minus, _ in ranked])
    bags = _Bags(texts, {term: place for place, term in enumerate(terms)}, idf, words)
    weight, bias = _fitted(bags, torch.tensor(labels, dtype=torch.float32), len(terms), penalty, steps)
    return TfidfModel(terms, idf, weight, float(bias), words=words, threshold=threshold)


def _fitted(bags: _Bags, labels: Tensor, terms: int, penalty: float, steps: int) -> tuple[Tensor, Tensor]:
    weight, bias = torch.zeros(terms, requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = functional.binary_cross_entropy_with_logits(bags.times(weight) + bias, labels)
        total = total + penalty / 2 * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), bias.detach()


class _Bags:
    """The TF-IDF features of texts, sparse ``[N, V]``."""

    def __init__(self, texts: Sequence[str], places: dict[str, int], idf: Tensor, words: int) -> None:
        counts = [Counter(places[term] for term in _terms(text, words) if term in places) for text in texts]
        self._terms = torch.tensor([place for each in counts for place in each], dtype=torch.int64)
        self._texts = torch.repeat_interleave(torch.tensor([len(each) for each in counts], dtype=torch.int64))
        often = torch.tensor([count for each in counts for count in each.values()], dtype=torch.float32)
        values = (1 + often.log()) * idf[self._terms]
        self._size = len(texts)
        self._values = values / self._sum(values.square()).sqrt()[self._texts]

    def times(self, weight: Tensor) -> Tensor:
        """The features times a vector, ``[N]``."""
        return self._sum(self._values * weight[self._terms])

    def _sum(self, values: Tensor) -> Tensor:
        return torch.zeros(self._size).index_add(0, self._texts, values)


def _terms(text: str, words: int) -> list[str]:
    found = _WORD.findall(text.lower())
    return [" ".join(found[i : i + n]) for n in range(1, words + 1) for i in range(len(found) - n + 1)]
