"""Behaviour cloning: imitate a dataset, or the best episodes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import UtteranceActor, save_language_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.offline import OfflineOptions, build_actor, build_lm, open_data, train_offline

__all__ = ["BC", "main"]


@dataclass(frozen=True, kw_only=True)
class BC(OfflineOptions):
    """Behaviour cloning on a dataset, or with --fraction below 1 on its best episodes."""

    preset: ClassVar[str] = "bc"


def main(options: BC) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    data = open_data(options)
    dataset = data.dataset
    torch.manual_seed(options.seed)
    lm = build_lm(options, data)
    actor = build_actor(options, lm)
    loss = BCLoss(actor, transition_weight=options.transition_weight, actor_normalizer="action")
    tokenizer = dataset.tokenizer
    policy = UtteranceActor(actor, tokenizer.control, data.evaluation.action_length, method="greedy")
    best = train_offline(
        options,
        data,
        loss,
        policy,
        save=lambda folder: save_language_model(folder, lm, tokenizer=tokenizer.config()),
        check=lambda rows: {"held_out_loss": imitation_loss(actor, rows)},
    )
    print(data.evaluation.next_steps(options.out), end="", flush=True)
    return best
