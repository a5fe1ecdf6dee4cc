"""The sentiment of texts, by VADER; the only module that imports it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SentimentReward"]


class SentimentReward:
    """The compound sentiment of a text in [-1, 1], by the lexicon and rules of VADER (Hutto and Gilbert 2014).

    It measures positive and negative words, not toxicity: insults that the lexicon lacks are neutral, 0.

    Raises:
        ImportError: vaderSentiment is not installed.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import SentimentReward
        >>> (SentimentReward()(["i love it", "it is terrible"]) > 0).tolist()  # doctest: +SKIP
        [True, False]
    """

    def __init__(self) -> None:
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        except ImportError as error:
            raise ImportError("SentimentReward needs it: pip install 'torchrl-lang[reddit]'.") from error
        self._analyzer = SentimentIntensityAnalyzer()

    def __call__(self, texts: list[str]) -> Tensor:
        """The sentiments of texts, float32 ``[N]``."""
        return torch.tensor([self._analyzer.polarity_scores(text)["compound"] for text in texts], dtype=torch.float32)
