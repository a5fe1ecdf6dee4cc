"""Behaviour cloning: speak as the data speaks."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_lang.modules import UtteranceActor, save_language_model
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.offline import TEXTWORLD, OfflineOptions, build_actor, build_lm, train_offline
from torchrl_lang.recipes.options import with_defaults
from torchrl_lang.recipes.tasks import open_dataset
from torchrl_lang.training import seed_everything

__all__ = ["BC", "TextWorldBC", "main"]


@dataclass(frozen=True)
class BC(OfflineOptions):
    """Behaviour cloning on a data set of games; with --fraction below 1 of the best ones alone."""


@with_defaults(**TEXTWORLD)
class TextWorldBC(BC):
    """Behaviour cloning of experts in TextWorld games."""


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
