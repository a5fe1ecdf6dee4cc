"""Recipes with values of whole utterances: shared options, and the heads that they save."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from torchrl_lang.modules import UtteranceQValueHead
from torchrl_lang.objectives.utterance_base import UtteranceValueLoss
from torchrl_lang.recipes.offline import OfflineOptions
from torchrl_lang.recipes.options import option

__all__ = ["UtteranceOptions", "saved_qvalues"]


@dataclass(frozen=True, kw_only=True)
class UtteranceOptions(OfflineOptions):
    """Options of the recipes whose policy ranks sampled utterances by their values."""

    gamma: float = option(0.99, "discount factor from an utterance to the next", at_least=0, at_most=1)
    tau: float = option(0.02, "soft update rate of the target Q", above=0, at_most=1)
    candidates: int = option(8, "utterances that the policy samples to play the best one", at_least=1)


def saved_qvalues(name: str, head: UtteranceQValueHead, loss: UtteranceValueLoss) -> dict[str, UtteranceQValueHead]:
    """The Q head that a loss trains, as ``name``, and with its target parameters, as ``target_<name>``."""
    target = deepcopy(head)
    target.load_state_dict(loss.target_qvalue_network_params.get("module").to_dict())
    return {f"target_{name}": target, name: head}
