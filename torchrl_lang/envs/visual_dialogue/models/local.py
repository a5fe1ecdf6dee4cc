"""Answerer and image guesser in this process, and on disk: weights as safetensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_lang._checks import have_shapes
from torchrl_lang._files import FileError, Record, RecordFolder, read_tensors
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.models.networks import Answerer, ImageGuesser, after_last_round, rank_percentile
from torchrl_lang.envs.visual_dialogue.models.words import MAX_WORDS, DialogueBatch, WordIndex

__all__ = ["LocalDialogueModels", "SavedDialogueModels", "load_dialogue_models", "save_dialogue_models"]

_REMEDY = "train and save the models again"
_WEIGHTS = {name: f"{name}.safetensors" for name in ("guesser", "answerer")}
_Size = Annotated[int, Field(ge=1, le=1 << 20)]


class _Sizes(Record):
    feature_size: _Size
    width: _Size
    embedding: _Size


class _Config(Record):
    guesser: _Sizes
    answerer: _Sizes
    words: Annotated[tuple[str, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _parts_fit(self) -> _Config:
        if len(set(self.words)) < len(self.words):
            raise ValueError("has a word twice")
        if self.guesser.feature_size != self.answerer.feature_size:
            sizes = self.guesser.feature_size, self.answerer.feature_size
            raise ValueError("has a guesser of {} features and an answerer of {}".format(*sizes))
        return self


_FORMAT = RecordFolder(_Config, "config.json", tuple(_WEIGHTS.values()), remedy=_REMEDY)


class SavedDialogueModels(NamedTuple):
    """The models of visual dialogues, and their words."""

    words: WordIndex
    guesser: ImageGuesser
    answerer: Answerer

    @classmethod
    def untrained(cls, words: WordIndex, **sizes: int) -> SavedDialogueModels:
        """Models with random weights; ``sizes``: ``feature_size`` and possibly ``width`` and ``embedding``."""
        return cls(words, ImageGuesser(len(words), **sizes), Answerer(len(words), **sizes))


def save_dialogue_models(models: SavedDialogueModels, folder: str | Path) -> None:
    """Save the models into a new folder, atomically.

    Args:
        models: guesser and answerer of one feature size, and their words.
        folder: the folder to create.

    Raises:
        FileExistsError: the folder exists and is not empty.
        ValueError: the models have different feature sizes, or weights that are not finite.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue import save_dialogue_models
        >>> from torchrl_lang.envs.visual_dialogue.models.local import SavedDialogueModels, load_dialogue_models
        >>> from torchrl_lang.envs.visual_dialogue.models.words import WordIndex
        >>> words = WordIndex.of_texts(["is it red? no"])
        >>> models = SavedDialogueModels.untrained(words, feature_size=64)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     save_dialogue_models(models, home + "/models")
        ...     load_dialogue_models(home + "/models").guesser.config
        {'feature_size': 64, 'width': 128, 'embedding': 64}
    """
    words, guesser, answerer = models
    sizes = {"guesser": _Sizes(**guesser.config), "answerer": _Sizes(**answerer.config)}
    with _FORMAT.write(folder, _Config(words=words.words, **sizes)) as target:
        parts: dict[str, nn.Module] = {"guesser": guesser, "answerer": answerer}
        for name, part in parts.items():
            wrong = [key for key, value in part.state_dict().items() if not value.isfinite().all()]
            if wrong:
                raise ValueError(f"The {name} has weights that are not finite ({wrong[0]}): it is not saved.")
            save_file({key: value.cpu() for key, value in part.state_dict().items()}, target / _WEIGHTS[name])


def load_dialogue_models(folder: str | Path) -> SavedDialogueModels:
    """Load models that :func:`save_dialogue_models` saved, on the CPU, in evaluation mode.

    Raises:
        FileError: a file is missing, damaged or does not fit the others.
    """
    folder, config = Path(folder), _FORMAT.read(folder)
    words = WordIndex(config.words)
    with torch.device("meta"):  # so that sizes from a file cannot exhaust the memory
        guesser = ImageGuesser(len(words), **config.guesser.model_dump())
        answerer = Answerer(len(words), **config.answerer.model_dump())
    for name, part in (("guesser", guesser), ("answerer", answerer)):
        _load_weights(part, folder / _WEIGHTS[name])
    return SavedDialogueModels(words, guesser, answerer)


def _load_weights(part: nn.Module, path: Path) -> None:
    weights, expected = read_tensors(path, remedy=_REMEDY), part.state_dict()
    for name in sorted(weights.keys() | expected.keys()):
        found = tuple(weights[name].shape) if name in weights else "no such weights"
        wanted = tuple(expected[name].shape) if name in expected else "none"
        if found != wanted or weights[name].dtype != expected[name].dtype:
            raise FileError(path, f"holds {name} of shape {found}, expected {wanted} of float32", _REMEDY)
    part.load_state_dict(weights, assign=True)
    part.eval()


class LocalDialogueModels:
    """:class:`DialogueModels` in this process: answers by the most probable words, distances and percentiles.

    They compute in float64, so that rounding, which depends on the batch, changes no word and no rank. The weights are
    copied.

    Args:
        models: guesser and answerer, or a folder of :func:`save_dialogue_models`.
        pool: L2-normalised features of the images among which the true one is ranked, ``[P, F]``: those of a split.
        max_words: of an answer.
        device: where to compute.
        dtype: float32 halves the memory of the pool.

    Raises:
        ValueError: the pool is empty or has another feature size.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, LocalDialogueModels
        >>> from torchrl_lang.envs.visual_dialogue.models.local import SavedDialogueModels
        >>> from torchrl_lang.envs.visual_dialogue.models.words import WordIndex
        >>> words = WordIndex.of_texts(["is it a dog? no"])
        >>> saved = SavedDialogueModels.untrained(words, feature_size=64)
        >>> pool = torch.nn.functional.normalize(torch.randn(5, 64), dim=-1)
        >>> models = LocalDialogueModels(saved, pool)
        >>> models.percentiles([Dialogue("a dog")], pool[:1]).shape
        torch.Size([1])
    """

    def __init__(
        self,
        models: SavedDialogueModels | str | Path,
        pool: Tensor,
        *,
        max_words: int = 20,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not isinstance(models, SavedDialogueModels):
            models = load_dialogue_models(models)
        self.feature_size: int = models.guesser.config["feature_size"]
        if pool.ndim != 2 or not len(pool) or pool.shape[1] != self.feature_size:
            raise ValueError(
                f"The pool must be features [P, {self.feature_size}] of at least one image, got {list(pool.shape)}."
            )
        self.device, self.dtype, self.max_words = torch.device(device), dtype, max_words
        self.words = models.words
        self._guesser = deepcopy(models.guesser).to(self.device, dtype).eval().requires_grad_(False)
        self._answerer = deepcopy(models.answerer).to(self.device, dtype).eval().requires_grad_(False)
        self._pool = pool.to(self.device, dtype)
        self._pool_sizes = self._pool.square().sum(-1)

    @torch.no_grad()
    def answers(self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor) -> list[str]:
        """The reply to one new question of each dialogue; ``features`` is float ``[N, F]``, L2-normalised."""
        if len(questions) != len(dialogues):
            raise ValueError(f"Give a question for each of {len(dialogues)} dialogues, got {len(questions)}.")
        if not dialogues:
            return []
        batch, images = self._prepared(dialogues, features)
        history = after_last_round(self._answerer.encoder(batch), batch.rounds)
        asked = self.words.ids(questions, longest=MAX_WORDS).to(self.device)
        start = self._answerer.start(history, asked, images)
        return [self.words.text(ids) for ids in self._answerer.answer(start, max_words=self.max_words).tolist()]

    @torch.no_grad()
    def distances(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float32 ``[N]``: mean squared difference of predicted and true feature after the last round."""
        if not dialogues:
            return torch.zeros(0)
        batch, images = self._prepared(dialogues, features)
        return (self._guesser.predict(batch) - images).square().mean(-1).float().cpu()

    @torch.no_grad()
    def percentiles(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float32 ``[N]`` in ``[0, 1]``: ``1 - rank / (P + 1)`` of the true image after the last round."""
        if not dialogues:
            return torch.zeros(0)
        batch, images = self._prepared(dialogues, features)
        predicted = self._guesser.predict(batch)
        return rank_percentile(predicted, images, self._pool, self._pool_sizes).float().cpu()

    @torch.no_grad()
    def by_round(self, dialogues: Sequence[Dialogue], features: Tensor) -> list[tuple[list[float], list[float]]]:
        """Distances and percentiles of each dialogue, both after the caption and after each of its rounds.

        They are those of the dialogues' beginnings, in one pass over each dialogue.
        """
        batch, images = self._prepared(dialogues, features)
        predicted = self._guesser(batch)  # [N, 1 + R, F]
        true = images[:, None].expand_as(predicted).flatten(0, 1)
        distances = (predicted.flatten(0, 1) - true).square().mean(-1)
        percentiles = rank_percentile(predicted.flatten(0, 1), true, self._pool)
        found = [each.float().view(len(dialogues), -1).double().tolist() for each in (distances, percentiles)]
        ends = [1 + len(dialogue.rounds) for dialogue in dialogues]
        return [(far[:end], rank[:end]) for far, rank, end in zip(*found, ends, strict=True)]

    def _prepared(self, dialogues: Sequence[Dialogue], features: Tensor) -> tuple[DialogueBatch, Tensor]:
        have_shapes(("features", features, (len(dialogues), self.feature_size)))
        return DialogueBatch.of(dialogues, self.words).to(self.device), features.to(self.device, self.dtype)
