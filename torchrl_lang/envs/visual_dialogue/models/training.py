"""Train the image guesser and the answerer on dialogues and the features of their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrl_lang._checks import check_options
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.envs.visual_dialogue.models.local import SavedDialogueModels
from torchrl_lang.envs.visual_dialogue.models.networks import WHITENED, Answerer, ImageGuesser
from torchrl_lang.envs.visual_dialogue.models.words import PAD, DialogueBatch, WordIndex, with_begin_and_end

__all__ = ["DialogueTraining", "train_dialogue_models"]

_COUNTS = ("guesser_epochs", "answerer_epochs", "batch_size", "width", "embedding", "least_count")
Report = Callable[[str, int, float], None]
"""Called with "guesser" or "answerer", the number of the epoch and its mean loss."""


@dataclass(frozen=True)
class DialogueTraining:
    """How to train guesser and answerer.

    Args:
        guesser_epochs: passes over the dialogues.
        answerer_epochs: passes over the dialogues.
        batch_size: dialogues in a batch.
        guesser_rate: learning rate of Adam at the first step; it falls linearly to 0.
        answerer_rate: the same, for the answerer.
        width: of the models' states.
        embedding: of the embeddings of words.
        least_count: rarer words are unknown words.
        seed: of the initial weights and the order of the dialogues.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import DialogueTraining
        >>> DialogueTraining(guesser_epochs=4).batch_size
        32
    """

    guesser_epochs: int = 16
    answerer_epochs: int = 8
    batch_size: int = 32
    guesser_rate: float = 1e-3
    answerer_rate: float = 4e-3
    width: int = 128
    embedding: int = 64
    least_count: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in _COUNTS}
        rates = {name: (getattr(self, name), "(0, inf)") for name in ("guesser_rate", "answerer_rate")}
        check_options(**{name: (number, 1) for name, number in numbers.items()}, **rates)


def train_dialogue_models(
    dialogues: Sequence[Dialogue],
    features: ImageFeatures,
    options: DialogueTraining | None = None,
    *,
    device: torch.device | str = "cpu",
    report: Report | None = None,
) -> SavedDialogueModels:
    """Train the image guesser and the answerer; on 3,000 generated dialogues in a minute or two on one core.

    The guesser minimises the squared difference of predicted and true feature after the caption and after each round,
    the answerer the cross entropy of the words of each answer. The global random stream is left as it was.

    Args:
        dialogues: dialogue ``i`` is about image ``i`` of ``features``.
        features: L2-normalised.
        options: default ``DialogueTraining()``.
        device: where to train.
        report: called after each epoch.

    Raises:
        ValueError: the numbers of dialogues and features differ, the features are not L2-normalised, or a dialogue has
            no rounds.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs import visual_dialogue as vd
        >>> with tempfile.TemporaryDirectory() as home:
        ...     vd.generate_visual_dialogues(home, {"train": 8}, feature_size=64, npy=True)
        ...     files = vd.SplitFiles.in_folder(home, "train", npy=True)
        ...     data = vd.VisualDialogues(files.dialogues, files.features, "train")
        ...     options = vd.DialogueTraining(guesser_epochs=1, answerer_epochs=1, width=16)
        ...     vd.train_dialogue_models(data.dialogues, data.features, options).guesser.config["width"]
        16
    """
    options = DialogueTraining() if options is None else options
    if len(dialogues) != len(features) or not features.normalize or not all(each.rounds for each in dialogues):
        raise ValueError(
            f"Training needs a dialogue with rounds for each L2-normalised feature, got {len(dialogues)} dialogues, "
            f"{len(features)} features with normalize={features.normalize}."
        )
    words = WordIndex.of_texts((text for each in dialogues for text in each.texts), least=options.least_count)
    batch = DialogueBatch.of(dialogues, words)
    sizes = {"width": options.width, "embedding": options.embedding}
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        models = SavedDialogueModels.untrained(words, feature_size=features.feature_size, **sizes)
        guesser, answerer = models.guesser.to(device), models.answerer.to(device)
        answerer.components.fit(features.rows(torch.randperm(len(features))[:WHITENED]))
        size = options.batch_size
        runs = {
            "guesser": _epochs(
                guesser, guesser_loss, batch, features, options.guesser_epochs, options.guesser_rate, size
            ),
            "answerer": _epochs(
                answerer, answerer_loss, batch, features, options.answerer_epochs, options.answerer_rate, size
            ),
        }
        for name, run in runs.items():
            for epoch, loss in run:
                if report is not None:
                    report(name, epoch, loss)
    return SavedDialogueModels(words, guesser.cpu().eval(), answerer.cpu().eval())


def guesser_loss(guesser: ImageGuesser, batch: DialogueBatch, features: Tensor) -> Tensor:
    """Mean over dialogues and the rounds that they have of ``|p - f|^2``.

    Args:
        guesser: the model.
        batch: N dialogues.
        features: of their images, ``[N, F]``.
    """
    error = (guesser(batch) - features[:, None]).square().sum(-1)  # [N, 1 + R]
    real = torch.arange(error.shape[1], device=error.device) <= batch.rounds[:, None]
    return error[real].mean()


def answerer_loss(answerer: Answerer, batch: DialogueBatch, features: Tensor) -> Tensor:
    """Mean cross entropy of the words of all answers, with the end; arguments as of :func:`guesser_loss`."""
    real = torch.arange(batch.questions.shape[1], device=features.device) < batch.rounds[:, None]  # [N, R]
    history = answerer.encoder(batch)[:, :-1][real]  # before each question
    images = features[:, None].expand(-1, real.shape[1], -1)[real]
    answers = with_begin_and_end(batch.answers[real])
    logits = answerer(answerer.start(history, batch.questions[real], images), answers[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), answers[:, 1:].flatten(), ignore_index=PAD)


def _epochs(
    model: nn.Module,
    loss_of: Callable[..., Tensor],
    batch: DialogueBatch,
    features: ImageFeatures,
    epochs: int,
    rate: float,
    batch_size: int,
) -> Iterator[tuple[int, float]]:
    """Train; the number and the mean loss of each epoch."""
    many, device = len(features), next(model.parameters()).device
    steps = epochs * -(-many // batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.randperm(many).split(batch_size):
            loss = loss_of(model, batch.rows(rows).to(device), features.rows(rows).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        yield epoch, total / many
