"""Behaviour cloning: imitate a dataset, or the best episodes of it."""

from __future__ import annotations

import torch

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import UtteranceActor, save_language_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithms import BC
from torchrl_lang.recipes.offline import build_actor, open_data, train_offline
from torchrl_lang.recipes.start_model import build_model

__all__ = ["BC", "main"]


def main(options: BC) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    data = open_data(options)
    dataset = data.dataset
    torch.manual_seed(options.seed)
    model = build_model(options, data)
    actor = build_actor(options, model)
    loss = BCLoss(actor, transition_weight=options.transition_weight, actor_normalizer="action")
    tokenizer = dataset.tokenizer
    policy = UtteranceActor(actor, tokenizer.control, data.evaluation.action_length, method="greedy")
    best = train_offline(
        options,
        data,
        loss,
        policy,
        save=lambda folder: save_language_model(folder, model.lm, model.heads, tokenizer=tokenizer.config()),
        check=lambda rows: {"held_out_loss": imitation_loss(actor, rows)},
    )
    print(data.evaluation.next_steps(options.out), end="", flush=True)
    return best
