"""Train the answerer and the image guesser of visual dialogues, save them, and use them in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from torchrl_lang._checks import Count, Positive, checked, have_shapes
from torchrl_lang._files import Record, RecordFolder, read_weights, write_weights
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.files import ImageFeatures
from torchrl_lang.envs.visual_dialogue.networks import WHITENED, Answerer, DialogueBatch, ImageGuesser, WordIndex

_REMEDY = "train and save the models again"
_Size = Annotated[int, Field(ge=1, le=1 << 20)]


class _Config(Record):
    VERSION: ClassVar[int] = 2
    feature_size: _Size
    width: _Size
    embedding: _Size
    words: Annotated[tuple[str, ...], Field(min_length=1)]


_FORMAT = RecordFolder(_Config, "config.json", ("guesser.safetensors", "answerer.safetensors"), remedy=_REMEDY)


class TrainedModels(NamedTuple):
    """The networks of visual dialogues, of one feature size, and their words.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue.models import TrainedModels
        >>> from torchrl_lang.envs.visual_dialogue.networks import WordIndex
        >>> models = TrainedModels.untrained(WordIndex.of_texts(["is it red? no"]), feature_size=64)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     models.save(home + "/models")
        ...     TrainedModels.load(home + "/models").guesser.config
        {'feature_size': 64, 'width': 128, 'embedding': 64}
    """

    words: WordIndex
    guesser: ImageGuesser
    answerer: Answerer

    @classmethod
    def untrained(cls, words: WordIndex, **sizes: int) -> TrainedModels:
        """Models with random weights; ``sizes``: ``feature_size`` and possibly ``width`` and ``embedding``."""
        return cls(words, ImageGuesser(len(words), **sizes), Answerer(len(words), **sizes))

    def save(self, folder: str | Path) -> None:
        """Save the models into a new folder, atomically: weights as safetensors, the rest as JSON.

        Raises:
            FileExistsError: the folder exists and is not empty.
            ValueError: weights are not finite.
        """
        with _FORMAT.write(folder, _Config(words=self.words.words, **self.guesser.config)) as target:
            for name, part in self._parts.items():
                write_weights(target / f"{name}.safetensors", part.state_dict(), name)

    @classmethod
    def load(cls, folder: str | Path) -> TrainedModels:
        """Load what :meth:`save` saved, on the CPU, in evaluation mode.

        Raises:
            FileError: a file is missing, damaged or does not fit the others.
        """
        config = _FORMAT.read(folder)
        with torch.device("meta"):  # so that sizes from a file cannot exhaust the memory
            models = cls.untrained(WordIndex(config.words), **config.model_dump(exclude={"words"}))
        for name, part in models._parts.items():
            path = Path(folder) / f"{name}.safetensors"
            part.load_state_dict(read_weights(path, part.state_dict(), f"{name}'s", remedy=_REMEDY), assign=True)
            part.eval()
        return models

    @property
    def _parts(self) -> dict[str, nn.Module]:
        return {"guesser": self.guesser, "answerer": self.answerer}


# -- in this process ---------------------------------------------------------------------------------------------------


class LocalDialogueModels:
    """:class:`DialogueModels` in this process: answers by the most probable words, distances and percentiles.

    They compute in float64, so that rounding, which depends on the batch, changes no word and no rank. The weights are
    copied.

    Args:
        models: of :func:`train_dialogue_models`, or the folder in which their ``save`` saved them.
        pool: L2-normalised features of the images among which the true one is ranked, ``[P, F]``: those of a split.
        device: where to compute.

    Raises:
        ValueError: the pool has another feature size.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, LocalDialogueModels
        >>> from torchrl_lang.envs.visual_dialogue.models import TrainedModels
        >>> from torchrl_lang.envs.visual_dialogue.networks import WordIndex
        >>> trained = TrainedModels.untrained(WordIndex.of_texts(["is it a dog? no"]), feature_size=64)
        >>> pool = torch.nn.functional.normalize(torch.randn(5, 64), dim=-1)
        >>> models = LocalDialogueModels(trained, pool)
        >>> models.percentiles([Dialogue("a dog")], pool[:1]).shape
        torch.Size([1])
    """

    def __init__(self, models: TrainedModels | str | Path, pool: Tensor, *, device: torch.device | str = "cpu") -> None:
        if not isinstance(models, TrainedModels):
            models = TrainedModels.load(models)
        self.feature_size: int = models.guesser.config["feature_size"]
        have_shapes(("pool", pool, (len(pool), self.feature_size)))
        self.device, self.words = torch.device(device), models.words
        self._guesser = deepcopy(models.guesser).to(self.device).double().eval()
        self._answerer = deepcopy(models.answerer).to(self.device).double().eval()
        self._pool = pool.to(self.device).double()
        self._pool_sizes = self._pool.square().sum(-1)

    @torch.no_grad()
    def answers(self, dialogues: Sequence[Dialogue], questions: Sequence[str], features: Tensor) -> list[str]:
        """The reply to one new question of each dialogue; ``features`` is float ``[N, F]``, L2-normalised."""
        batch, images = self._prepared(dialogues, features)
        asked = self.words.ids(questions).to(self.device)
        start = self._answerer.start(self._answerer.encoder.last(batch), asked, images)
        return [self.words.text(ids) for ids in self._answerer.answer(start).tolist()]

    @torch.no_grad()
    def distances(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float32 ``[N]``: mean squared difference of predicted and true feature after the last round."""
        batch, images = self._prepared(dialogues, features)
        return (self._guesser.predict(batch) - images).square().mean(-1).float().cpu()

    @torch.no_grad()
    def percentiles(self, dialogues: Sequence[Dialogue], features: Tensor) -> Tensor:
        """Float32 ``[N]`` in ``[0, 1]``: ``1 - rank / (P + 1)`` of the true image after the last round."""
        batch, images = self._prepared(dialogues, features)
        return rank_percentile(self._guesser.predict(batch), images, self._pool, self._pool_sizes).float().cpu()

    @torch.no_grad()
    def by_round(self, dialogues: Sequence[Dialogue], features: Tensor) -> list[tuple[list[float], list[float]]]:
        """Distances and percentiles of each dialogue, both after the caption and after each of its rounds.

        They are those of the dialogues' beginnings, in one pass over each dialogue.
        """
        batch, images = self._prepared(dialogues, features)
        predicted = self._guesser(batch)  # [N, 1 + R, F]
        true = images[:, None].expand_as(predicted).flatten(0, 1)
        distances = (predicted.flatten(0, 1) - true).square().mean(-1)
        percentiles = rank_percentile(predicted.flatten(0, 1), true, self._pool, self._pool_sizes)
        found = [each.float().view(len(dialogues), -1).double().tolist() for each in (distances, percentiles)]
        ends = [1 + len(dialogue.rounds) for dialogue in dialogues]
        return [(far[:end], rank[:end]) for far, rank, end in zip(*found, ends, strict=True)]

    def _prepared(self, dialogues: Sequence[Dialogue], features: Tensor) -> tuple[DialogueBatch, Tensor]:
        have_shapes(("features", features, (len(dialogues), self.feature_size)))
        return DialogueBatch.of(dialogues, self.words).to(self.device), features.to(self.device).double()


_TIE = 1e-6


def rank_percentile(predicted: Tensor, true: Tensor, pool: Tensor, sizes: Tensor) -> Tensor:
    """``1 - rank / (P + 1)`` of the true image among it and the pool, ``[N]``; the nearest image has rank 1.

    As the server of the ILQL paper (arXiv 2206.11871) does, the true image counts beside the pool, also where the pool
    has it, too. The rank counts the images of the pool that are nearer than the true one by more than 1e-6 (rounding
    may place its copy a little nearer), and the true one.

    Args:
        predicted: ``[N, F]``.
        true: features of the true images, ``[N, F]``.
        pool: features of all images, ``[P, F]``.
        sizes: the squared lengths of the pool's features, ``[P]``.
    """
    distances = predicted.square().sum(-1, keepdim=True) - 2 * predicted @ pool.T + sizes  # [N, P]
    own = (predicted - true).square().sum(-1, keepdim=True)
    nearer = (distances < own - _TIE).sum(-1)
    return 1 - (1 + nearer).to(predicted.dtype) / (len(pool) + 1)


# -- training ----------------------------------------------------------------------------------------------------------


@checked
def train_dialogue_models(
    dialogues: Sequence[Dialogue],
    features: ImageFeatures,
    *,
    guesser_epochs: Count = 16,
    answerer_epochs: Count = 8,
    batch_size: Count = 32,
    guesser_rate: Positive = 1e-3,
    answerer_rate: Positive = 4e-3,
    width: Count = 128,
    embedding: Count = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
    report: Callable[[str, int, float], None] = lambda name, epoch, loss: None,
) -> TrainedModels:
    """Train the image guesser and the answerer; on 3,000 generated dialogues in a minute or two on one core.

    The guesser minimises the squared difference of predicted and true feature after the caption and after each round,
    the answerer the cross entropy of the words of each answer. The global random stream is left as it was.

    Args:
        dialogues: dialogue ``i`` is about image ``i`` of ``features``.
        features: of the images.
        guesser_epochs: passes over the dialogues.
        answerer_epochs: passes over the dialogues.
        batch_size: dialogues in a batch.
        guesser_rate: learning rate of Adam at the first step; it falls linearly to 0.
        answerer_rate: the same, for the answerer.
        width: of the models' states.
        embedding: of the embeddings of words.
        seed: of the initial weights and the order of the dialogues.
        device: where to train.
        report: called after each epoch with "guesser" or "answerer", the number of the epoch and its mean loss.

    Returns:
        Guesser, answerer and their words, with a method ``save(folder)``.

    Raises:
        ValueError: a number is out of range, the numbers of dialogues and features differ, or a dialogue has no rounds.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs import visual_dialogue as vd
        >>> with tempfile.TemporaryDirectory() as home:
        ...     vd.generate_visual_dialogues(home, {"train": 8}, feature_size=64, npy=True)
        ...     data = vd.VisualDialogues.in_folder(home, "train")
        ...     options = {"guesser_epochs": 1, "answerer_epochs": 1, "width": 16}
        ...     vd.train_dialogue_models(data.dialogues, data.features, **options).guesser.config["width"]
        16
    """
    if len(dialogues) != len(features) or not all(each.rounds for each in dialogues):
        given = f"{len(dialogues)} dialogues, {len(features)} features"
        raise ValueError(f"Training needs a dialogue with rounds for each feature, got {given}.")
    words = WordIndex.of_texts(text for each in dialogues for text in each.texts)
    batch, device = DialogueBatch.of(dialogues, words), torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sizes = {"feature_size": features.feature_size, "width": width, "embedding": embedding}
        models = TrainedModels.untrained(words, **sizes)
        guesser, answerer = models.guesser.to(device), models.answerer.to(device)
        answerer.components.fit(features.rows(torch.randperm(len(features))[:WHITENED]))
        plans = {"guesser": (guesser_epochs, guesser_rate), "answerer": (answerer_epochs, answerer_rate)}
        for name, (epochs, rate) in plans.items():
            model: Any = getattr(models, name)
            steps = epochs * -(-len(features) // batch_size)
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))  # noqa: B023
            for epoch in range(1, epochs + 1):
                total = 0.0
                for rows in torch.randperm(len(features)).split(batch_size):
                    loss = model.loss(batch.rows(rows).to(device), features.rows(rows).to(device))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    total += float(loss.detach()) * len(rows)
                report(name, epoch, total / len(features))
    return TrainedModels(words, guesser.cpu().eval(), answerer.cpu().eval())
