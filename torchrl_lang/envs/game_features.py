"""Features that games show beside their texts, such as those of an image: checked, and padded to a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.envs.game_turn import GamePlace
from torchrl_lang.schema import FEATURES, FEATURES_MASK

__all__ = ["check_size", "padded_features", "read_features"]


def check_size(size: Any) -> tuple[int, int]:
    """The size ``(P, F)`` of a game's features; a ValueError if it is none."""
    fits = isinstance(size, tuple) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)
    if not fits:
        raise ValueError(
            f"features must be (P, F), the largest number of a game's vectors and their width, got {size}."
        )
    return size


def read_features(given: Any, place: GamePlace, size: tuple[int, int]) -> Tensor:
    """The features of a game, float32 ``[n, F]`` with ``n`` up to ``P``, on the CPU.

    Raises:
        TypeError: they are no numbers.
        ValueError: they have another shape, or are not finite.

    Examples:
        >>> from torchrl_lang.envs.game_features import read_features
        >>> from torchrl_lang.envs.game_turn import GamePlace
        >>> read_features([[1.0, 2.0]], GamePlace(0, 7, 0), (3, 2))
        tensor([[1., 2.]])
        >>> read_features([1.0, 2.0], GamePlace(0, 7, 0), (3, 2))
        Traceback (most recent call last):
            ...
        ValueError: Game 0 of the batch (seed 7, turn 0) shows features of shape (2,), expected up to 3 vectors of 2 ...
    """
    try:
        features = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{place} shows {shorten(given)} as its features: set the game's attribute features to numbers in reset."
        ) from error
    count, width = size
    if features.ndim != 2 or features.shape[0] > count or features.shape[1] != width:
        if features.numel():  # a game may show none
            raise ValueError(
                f"{place} shows features of shape {tuple(features.shape)}, expected up to {count} vectors of {width} "
                "numbers: give the environment their number and width, features=(P, F)."
            )
        return torch.zeros(0, width)
    if not bool(features.isfinite().all()):
        raise ValueError(f"{place} shows features that are not finite: replace such numbers.")
    return features


def padded_features(
    shown: Mapping[int, Tensor], n: int, size: tuple[int, int], device: torch.device | None
) -> dict[str, Tensor]:
    """The features of ``n`` rows, padded with zeros, and their mask; of rows without any, zeros.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.game_features import padded_features
        >>> padded_features({1: torch.ones(2, 5)}, 3, (4, 5), None)["features_mask"].long()
        tensor([[0, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 0, 0, 0]])
    """
    padded, mask = torch.zeros(n, *size), torch.zeros(n, size[0], dtype=torch.bool)
    for row, features in shown.items():
        padded[row, : len(features)], mask[row, : len(features)] = features, True
    return {FEATURES: padded.to(device), FEATURES_MASK: mask.to(device)}
