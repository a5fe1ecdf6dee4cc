"""The training loop of recipes that learn from stored or drawn data; it logs, evaluates, saves and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule, TargetNetUpdater

from torchrl_lang.recipes.run_common import TrainingOptions, is_due, make_optimizer, resume
from torchrl_lang.recipes.trainable_state import TrainableState
from torchrl_lang.training import (
    Checkpointer,
    FiniteCheck,
    Progress,
    RandomState,
    Stateful,
    check_parameters,
    train_steps,
)

__all__ = ["train_and_evaluate"]


def train_and_evaluate(
    options: TrainingOptions,
    checkpoints: Checkpointer,
    loss: LossModule,
    sample: Callable[[], TensorDictBase],
    evaluate: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]],
    *,
    steps: int,
    weight_decay: float,
    target_updater: TargetNetUpdater | None = None,
    shown: str | None = None,
    **batches: Stateful,
) -> None:
    """Train from the last checkpoint to ``steps``; each evaluation is logged and makes a checkpoint.

    Args:
        options: of the run.
        checkpoints: of the run.
        loss: to minimize.
        sample: the next batch.
        evaluate: figures of the model that are saved with its checkpoint, the one that chooses it among them, and
            further ones that are logged.
        steps: number of training steps.
        weight_decay: of the optimizer.
        target_updater: updates the loss's target parameters.
        shown: the figure to show during training; default the one that chooses the checkpoint.
        **batches: what a checkpoint has of the order of batches.
    """
    device = options.torch_device()
    optimizer, scheduler = make_optimizer(options, loss, steps, weight_decay=weight_decay)
    parts: dict[str, Any] = {"loss": TrainableState(loss), "optimizer": optimizer, "scheduler": scheduler}
    start, log = resume(options, checkpoints, {**parts, **batches, "random": RandomState()})
    finite = FiniteCheck()
    training = train_steps(
        loss,
        lambda: sample().to(device),
        optimizer,
        steps=steps,
        start=start,
        scheduler=scheduler,
        target_updater=target_updater,
        max_grad_norm=options.max_grad_norm,
        autocast=torch.bfloat16 if options.bf16 else None,
        finite=finite,
    )
    progress = Progress(steps, label=options.out.name, start=start, shown=("loss", shown or checkpoints.best_by))
    with closing(log), progress:
        for step, figures in training:
            progress.update(step, figures)
            if is_due(step, options.log_every, steps):
                log.log(step, figures)
            if is_due(step, options.eval_every, steps):
                finite.check()
                check_parameters(loss, f"after step {step}")
                found, further = evaluate()
                log.log(step, {**found, **further})
                progress.update(step, {**found, **further})
                checkpoints.save(step, found)
