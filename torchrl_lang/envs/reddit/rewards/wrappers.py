"""Rewards made of other rewards: the worst sentence, three levels and noise."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang.envs.reddit.text_reward import TextReward, rewards_of

__all__ = ["Noised", "ThreeLevels", "WorstSentence"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class WorstSentence:
    """The largest value among a text's sentences, for a reward that is high for harmful texts.

    A model that averages over words finds an insult in a long text less harmful than the same insult alone.
    Sentences end with ``.``, ``!`` or ``?`` before white space.

    Args:
        reward: is called once with the sentences of all texts.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import WorstSentence
        >>> def share_of_rude_words(texts):
        ...     return torch.tensor([text.split().count("damn") / len(text.split()) for text in texts])
        >>> texts = ["no damn way. i would try it again in winter"]
        >>> share_of_rude_words(texts), WorstSentence(share_of_rude_words)(texts)
        (tensor([0.1000]), tensor([0.3333]))
    """

    def __init__(self, reward: TextReward) -> None:
        self.reward = reward

    def __call__(self, texts: list[str]) -> Tensor:
        """The largest values, float32 ``[N]``."""
        sentences = [_SENTENCE_END.split(text) for text in texts]
        values = rewards_of(self.reward, [sentence for each in sentences for sentence in each])
        return torch.tensor([float(each.max()) for each in values.split([len(each) for each in sentences])])


class ThreeLevels:
    """The levels of the ILQL paper's toxicity filter, from a probability ``p`` (arXiv 2206.11871):

    0 (safe) if ``p < low``, 2 (toxic) if ``p >= high``, else 1 (sensitive).

    Args:
        reward: gives probabilities, such as :class:`ProfanityReward`.
        low: where level 1 begins.
        high: where level 2 begins.

    Raises:
        ValueError: ``low`` is above ``high``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import ThreeLevels
        >>> ThreeLevels(lambda texts: torch.tensor([0.1, 0.25, 0.75]), low=0.25, high=0.75)(["a", "b", "c"])
        tensor([0., 1., 2.])
    """

    def __init__(self, reward: TextReward, *, low: float = 1 / 3, high: float = 2 / 3) -> None:
        finite("low", low, low=None)
        finite("high", high, low=low)
        self.reward, self.low, self.high = reward, low, high

    def __call__(self, texts: list[str]) -> Tensor:
        """The levels of texts, float32 ``[N]``."""
        found = rewards_of(self.reward, texts)
        return (found >= self.low).float() + (found >= self.high).float()


class Noised:
    """Level 1 becomes 0 or 2, with equal probability; the expected reward stays the same.

    The same text may get different values in different calls, and twice in one call. So a cache belongs inside,
    ``Noised(CachedReward(...))``: around it, the cache would keep the first draw.

    Args:
        reward: gives levels, such as :class:`ThreeLevels`; values other than 1 stay as they are.
        seed: of the generator, which is this object's own.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import Noised
        >>> Noised(lambda texts: torch.ones(len(texts)), seed=0)(["a"] * 6)
        tensor([0., 2., 2., 0., 2., 2.])
    """

    def __init__(self, reward: TextReward, *, seed: int = 0) -> None:
        self.reward = reward
        self._generator = torch.Generator()
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        """Begin the noise of a seed again."""
        self._generator.manual_seed(seed)

    def __call__(self, texts: list[str]) -> Tensor:
        """The noised levels of texts, float32 ``[N]``."""
        found = rewards_of(self.reward, texts)
        drawn = 2.0 * torch.randint(2, found.shape, generator=self._generator)
        return torch.where(found == 1, drawn, found)
