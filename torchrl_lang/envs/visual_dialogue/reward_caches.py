"""Compute the values of the rounds of dialogues, which the caches of rewards hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.functional.checks import at_least_one, one_of
from torchrl_lang.storage import write_file

__all__ = ["reward_cache", "values_by_round", "write_reward_cache"]

Measure = Literal["rank", "distance"]


def values_by_round(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    features: ImageFeatures,
    *,
    measure: Measure = "rank",
    batch_size: int = 32,
) -> Iterator[Tensor]:
    """For each dialogue the percentile, or the distance, after the caption and after each round, float ``[1 + R]``.

    Args:
        models: the guesser.
        dialogues: dialogue ``i`` is about image ``i`` of ``features``.
        features: L2-normalised.
        measure: percentile, or distance of predicted and true feature.
        batch_size: dialogues in a call of the guesser, which gets all of their rounds.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue import (
        ...     SplitFiles, VisualDialogues, generate_visual_dialogues, values_by_round
        ... )
        >>> class Blind:
        ...     feature_size = 64
        ...     def percentiles(self, dialogues, features):
        ...         return torch.full((len(dialogues),), 0.5)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"val": 3}, feature_size=64, npy=True)
        ...     files = SplitFiles.in_folder(home, "val", npy=True)
        ...     data = VisualDialogues(files.dialogues, files.features, "val")
        ...     [len(values) for values in values_by_round(Blind(), data.dialogues, data.features)]
        [11, 11, 11]
    """
    one_of("measure", measure, ("rank", "distance"))
    at_least_one("batch_size", batch_size)
    for first in range(0, len(dialogues), batch_size):
        block = dialogues[first : first + batch_size]
        lengths = [1 + len(each.rounds) for each in block]
        parts = [Dialogue(each.caption, each.rounds[:end]) for each in block for end in range(1 + len(each.rounds))]
        images = features.rows(range(first, first + len(block))).repeat_interleave(torch.tensor(lengths), dim=0)
        values = models.percentiles(parts, images) if measure == "rank" else models.distances(parts, images)
        yield from values.split(lengths)


def reward_cache(values: Tensor, *, measure: Measure = "rank") -> list[float]:
    """The initial value and the reward of each round: the increase of the percentile, or the decrease of the distance.

    Args:
        values: after the caption and after each round, ``[1 + R]``.
        measure: which of the two they are.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import reward_cache
        >>> reward_cache(torch.tensor([0.5, 0.75, 0.625]))
        [0.5, 0.25, -0.125]
        >>> reward_cache(torch.tensor([0.5, 0.25]), measure="distance")
        [0.5, 0.25]
    """
    one_of("measure", measure, ("rank", "distance"))
    exact = values.double()
    change = exact.diff() if measure == "rank" else -exact.diff()
    return [float(exact[0]), *change.tolist()]


def write_reward_cache(
    path: str | Path,
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    features: ImageFeatures,
    *,
    measure: Measure = "rank",
    batch_size: int = 32,
) -> None:
    """Write the file that :func:`read_reward_cache` reads; the arguments are those of :func:`values_by_round`.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import SplitFiles
        >>> files = SplitFiles.in_folder("data", "train")
        >>> write_reward_cache(files.rank_rewards, models, data.dialogues, data.features)  # doctest: +SKIP
    """
    values = values_by_round(models, dialogues, features, measure=measure, batch_size=batch_size)
    write_file(path, json.dumps([reward_cache(each, measure=measure) for each in values]))
