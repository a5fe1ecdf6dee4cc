"""Psi-learning: the policy with the best return less its divergence from a prior, from a fixed dataset."""

from __future__ import annotations

from torchrl_lang.modules.save import saved_actor
from torchrl_lang.objectives import PsiLoss
from torchrl_lang.recipes.action_values import train_action_values
from torchrl_lang.recipes.algorithms import Psi
from torchrl_lang.recipes.offline import open_data
from torchrl_lang.recipes.start_model import model_of_run
from torchrl_lang.transforms import frozen_copy

__all__ = ["Psi", "main"]


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
