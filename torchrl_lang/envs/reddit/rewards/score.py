"""The upvotes of comments in a dataset as a reward."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang._files import shorten
from torchrl_lang.envs.reddit.dataset import RedditComments
from torchrl_lang.text.tokenizers import normalized

__all__ = ["ScoreReward"]


class ScoreReward:
    """1 for a comment whose score is above 0, else -1; comments are found by their normalized text.

    The ILQL paper's code calls it "upvotes real" (arXiv 2206.11871). Where several comments have the same text, the sum
    of their scores decides. (The paper's code takes one of them at random.)

    Args:
        data: the comments that have a reward.
        unknown: the reward of other texts; None: they are an error.

    Raises:
        ValueError: on calls, a text is not in the dataset and ``unknown`` is None.

    Examples:
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> from torchrl_lang.envs.reddit.rewards import ScoreReward
        >>> data = RedditComments(["hi"] * 3, ["well done", "so what", "so what"], [12, 4, -9])
        >>> ScoreReward(data, unknown=0.0)(["well done", "so what", "else"])
        tensor([ 1., -1.,  0.])
    """

    def __init__(self, data: RedditComments, *, unknown: float | None = None) -> None:
        if unknown is not None:
            finite("unknown", unknown, low=None)
        self.unknown = unknown
        total = defaultdict[str, int](int)
        for text, score in zip(data.comments, data.scores, strict=True):
            total[normalized(text)] += score
        self._values = {text: 1.0 if score > 0 else -1.0 for text, score in total.items()}

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        found = [self._values.get(normalized(text), self.unknown) for text in texts]
        if None in found:
            raise ValueError(
                f"None of the {len(self._values)} comments of the dataset is {shorten(texts[found.index(None)])}: give "
                f"a reward for other texts, unknown=0.0, or use a model of the scores (train_upvote_model)."
            )
        return torch.tensor(found, dtype=torch.float32)
