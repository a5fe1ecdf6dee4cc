"""The models of visual dialogues on disk: weights as safetensors, the rest as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from torchrl_lang._files import Fields, FileError, FolderFormat, read_tensors
from torchrl_lang.envs.visual_dialogue.models.answerer import Answerer
from torchrl_lang.envs.visual_dialogue.models.guesser import ImageGuesser
from torchrl_lang.envs.visual_dialogue.models.words import WordIndex

__all__ = ["SavedDialogueModels", "load_dialogue_models", "save_dialogue_models"]

_REMEDY = "train and save the models again"
_WEIGHTS = {name: f"{name}.safetensors" for name in ("guesser", "answerer")}
_FORMAT = FolderFormat("config.json", tuple(_WEIGHTS.values()), remedy=_REMEDY, version=1)
_LARGEST = 1 << 20


class SavedDialogueModels(NamedTuple):
    """The models of visual dialogues, and their words.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue.models import SavedDialogueModels, WordIndex
        >>> words = WordIndex.of_texts(["is it red? no"])
        >>> SavedDialogueModels.untrained(words, feature_size=64).words.words[0]
        '?'
    """

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
        >>> from torchrl_lang.envs.visual_dialogue import load_dialogue_models, save_dialogue_models
        >>> from torchrl_lang.envs.visual_dialogue.models import SavedDialogueModels, WordIndex
        >>> words = WordIndex.of_texts(["is it red? no"])
        >>> models = SavedDialogueModels.untrained(words, feature_size=64)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     save_dialogue_models(models, home + "/models")
        ...     load_dialogue_models(home + "/models").guesser.config
        {'feature_size': 64, 'width': 128, 'embedding': 64}
    """
    words, guesser, answerer = models
    if guesser.config["feature_size"] != answerer.config["feature_size"]:
        raise ValueError(
            f"The guesser has features of size {guesser.config['feature_size']}, the answerer of size "
            f"{answerer.config['feature_size']}: train both on the same features."
        )
    config = {"guesser": guesser.config, "answerer": answerer.config, "words": list(words.words)}
    with _FORMAT.write(folder, config) as target:
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
    names = config.list_of("words", str)
    try:
        words = WordIndex(names)
    except ValueError as error:
        raise config.error(f'has wrong "words" ({error})') from error
    with torch.device("meta"):  # so that sizes from a file cannot exhaust the memory
        guesser = ImageGuesser(len(words), **_sizes(config.object("guesser")))
        answerer = Answerer(len(words), **_sizes(config.object("answerer")))
    for name, part in (("guesser", guesser), ("answerer", answerer)):
        _load_weights(part, folder / _WEIGHTS[name])
    return SavedDialogueModels(words, guesser, answerer)


def _sizes(fields: Fields) -> dict[str, int]:
    sizes = {name: fields.at_least(name, 1) for name in ("feature_size", "width", "embedding")}
    for name, size in sizes.items():
        if size > _LARGEST:
            raise fields.error(f'has {size} as "{fields.name}.{name}", expected at most {_LARGEST}')
    return sizes


def _load_weights(part: nn.Module, path: Path) -> None:
    weights, expected = read_tensors(path, remedy=_REMEDY), part.state_dict()
    for name in sorted(weights.keys() | expected.keys()):
        found = tuple(weights[name].shape) if name in weights else "no such weights"
        wanted = tuple(expected[name].shape) if name in expected else "none"
        if found != wanted or weights[name].dtype != expected[name].dtype:
            raise FileError(path, f"holds {name} of shape {found}, expected {wanted} of float32", _REMEDY)
    part.load_state_dict(weights, assign=True)
    part.eval()
