"""Options of the recipes with values of whole utterances."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_lang.recipes.offline import OfflineOptions
from torchrl_lang.recipes.options import option

__all__ = ["UtteranceOptions"]


@dataclass(frozen=True, kw_only=True)
class UtteranceOptions(OfflineOptions):
    """Options of the recipes whose policy ranks sampled utterances by their values."""

    gamma: float = option(0.99, "discount factor from an utterance to the next", at_least=0, at_most=1)
    tau: float = option(0.02, "soft update rate of the target Q", above=0, at_most=1)
    candidates: int = option(8, "utterances that the policy samples to play the best one", at_least=1)
