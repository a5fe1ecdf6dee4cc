"""Answerer and image guesser in this process."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from torchrl_lang._checks import have_shapes
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.models.batch import MAX_WORDS, DialogueBatch
from torchrl_lang.envs.visual_dialogue.models.folder import SavedDialogueModels, load_dialogue_models
from torchrl_lang.envs.visual_dialogue.models.guesser import after_last_round, rank_percentile

__all__ = ["LocalDialogueModels"]


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
        >>> from torchrl_lang.envs.visual_dialogue.models import SavedDialogueModels, WordIndex
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
