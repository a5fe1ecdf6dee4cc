"""Whether texts are profane, by alt-profanity-check; the only module that imports it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.envs.reddit.rewards.probability import ProbabilityReward

__all__ = ["ProfanityReward"]


class ProfanityReward(ProbabilityReward):
    """The probability that a text is profane or insulting, by a linear model on word counts.

    1 is the most profane: scale it with a negative number to punish profanity. The model scores 200,000 short texts a
    second. It finds slurs and insults, and misses words in disguise ("sh1t") and hostility in polite words.

    Importing alt-profanity-check loads the model file of its own package with joblib, that is, with pickle; nothing
    else is read so. Install the package from a source that you trust.

    Args:
        threshold: see :class:`ProbabilityReward`.

    Raises:
        ImportError: alt-profanity-check is not installed.

    Examples:
        >>> from torchrl_lang.envs.reddit.rewards import ProfanityReward
        >>> reward = ProfanityReward(threshold=0.5)  # doctest: +SKIP
        >>> reward(["thank you", "what a load of crap"])  # doctest: +SKIP
        tensor([0., 1.])
    """

    def __init__(self, *, threshold: float | None = None) -> None:
        super().__init__(threshold)
        try:
            from profanity_check import predict_prob
        except ImportError as error:
            raise ImportError("ProfanityReward needs it: pip install 'torchrl-lang[reddit]'.") from error
        self._predict = predict_prob

    def _probabilities(self, texts: list[str]) -> Tensor:
        return torch.as_tensor(self._predict(texts), dtype=torch.float32)
