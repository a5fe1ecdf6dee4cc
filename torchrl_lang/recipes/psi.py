"""Psi-learning: the policy with the best return less its divergence from a prior, from a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torchrl_lang.modules.save import saved_actor
from torchrl_lang.objectives import PsiLoss
from torchrl_lang.recipes.action_values import ActionValueOptions, train_action_values
from torchrl_lang.recipes.offline import open_data
from torchrl_lang.recipes.options import option
from torchrl_lang.recipes.start_model import model_of_run
from torchrl_lang.transforms import frozen_copy

__all__ = ["Psi", "main"]


@dataclass(frozen=True, kw_only=True)
class Psi(ActionValueOptions):
    """Psi-learning (KL control) on a dataset (arXiv 1611.02796)."""

    preset: ClassVar[str] = "ilql"
    own_preset: ClassVar[str] = "psi"

    prior: Path | None = option(
        None, "folder of a finished run with the same tokens whose policy is the prior; none: the policy, as it learns"
    )
    reward_scale: float = option(1.0, "reward that is worth one nat of divergence from the prior", above=0)
    threshold: float = option(
        0.05,
        "least probability of a token relative to the likeliest one's; 0: as in the papers, which suits data that take "
        "every token at every state",
        at_least=0,
        at_most=1,
    )


def main(options: Psi) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    data = open_data(options)
    prior = None
    if options.prior is not None:
        model = model_of_run(options.prior, data)
        model.lm.to(options.torch_device())
        prior = frozen_copy(saved_actor(model).requires_grad_(False))
    return train_action_values(
        options,
        data,
        PsiLoss,
        terms={"prior": prior, "reward_scale": options.reward_scale, "threshold": options.threshold},
        guidance={"beta": 1.0, "include_logits": False},
        min_p=options.threshold or None,
        method="sample",  # the learned policy is a distribution
    )
