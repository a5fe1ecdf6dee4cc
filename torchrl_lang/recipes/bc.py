"""Behaviour cloning: speak as the data speaks."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_lang.modules import UtteranceActor, save_language_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.offline import OfflineOptions, build_actor, build_lm, train_offline
from torchrl_lang.recipes.options import option
from torchrl_lang.recipes.tasks import open_dataset
from torchrl_lang.training import seed_everything

__all__ = ["BC", "TextWorldBC", "main"]


@dataclass(frozen=True)
class BC(OfflineOptions):
    """Behaviour cloning on a data set of games; with --fraction below 1 of the best ones alone."""

    transition_weight: float = option(1.0, "weight of the environment's words in the loss")


@dataclass(frozen=True)
class TextWorldBC(BC):
    """Behaviour cloning of experts in TextWorld games."""

    steps: int = option(700, "optimiser steps")
    # The engine's words are many, and what they say of one game is of no use in the next.
    transition_weight: float = option(0.05, "weight of the environment's words in the loss")
    weight_decay: float = option(0.05, "AdamW's weight decay")
    batch_size: int = option(32, "games in a batch")
    eval_every: int = option(350, "steps between evaluations, each with a checkpoint")
    eval_games: int = option(64, "games an evaluation")


def main(options: BC) -> float:
    """Train; returns the best mean return."""
    dataset, task = open_dataset(options.data)
    seed_everything(options.seed)
    lm = build_lm(options, dataset)
    actor = build_actor(options, lm)
    loss = BCLoss(actor, transition_weight=options.transition_weight, actor_normalizer="action")
    tokenizer = dataset.tokenizer
    policy = UtteranceActor(actor, tokenizer.control, task.action_length)
    return train_offline(
        options,
        dataset,
        task,
        loss,
        policy,
        save=lambda folder: save_language_model(folder, lm, tokenizer=tokenizer.config()),
    )
