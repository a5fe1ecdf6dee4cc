"""What a reward of texts is, and a check of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang._files import shorten

__all__ = ["TextReward", "rewards_of"]


class TextReward(Protocol):
    """A function from texts to one number each; rewards score any number of texts in one call.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit import TextReward
        >>> def shorter_is_better(texts: list[str]) -> torch.Tensor:
        ...     return torch.tensor([-float(len(text)) for text in texts])
        >>> reward: TextReward = shorter_is_better
    """

    def __call__(self, texts: list[str], /) -> Tensor:
        """The values of texts, float32 ``[N]`` on the CPU."""


def rewards_of(
    reward: Callable[[list[str]], object], texts: Sequence[str], *, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """``scale * reward + shift`` of texts, float32 ``[N]``, checked; the ILQL paper's toxicity reward has the scale -5.

    Args:
        reward: a :class:`TextReward`, or a function that returns a list.
        texts: the texts.
        scale: the factor.
        shift: added to the product.

    Raises:
        ValueError: the reward does not return one finite number for each text, or the result is not finite.

    Examples:
        >>> from torchrl_lang.envs.reddit import rewards_of
        >>> rewards_of(lambda texts: [len(text) for text in texts], ["a", "bcd"])
        tensor([1., 3.])
    """
    finite("scale", scale, low=None)
    finite("shift", shift, low=None)
    found = reward(list(texts))
    try:
        values = torch.as_tensor(found, dtype=torch.float32, device="cpu").detach() * scale + shift
    except OverflowError as error:
        raise ValueError(f"Rewards must be finite, got {shorten(found)}.") from error
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0, 0)
    if values.shape != (len(texts),):
        raise ValueError(f"A reward needs one number for each of {len(texts)} texts, got {shorten(found)}.")
    if not values.isfinite().all():
        place = int((~values.isfinite()).nonzero()[0, 0])
        raise ValueError(f"Rewards must be finite, got {values[place]} for {shorten(texts[place])}.")
    return values
