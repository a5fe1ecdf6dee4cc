"""The training loop of the recipes of algorithm distillation: it logs, evaluates and saves, and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule

from torchrl_lang.recipes.run_common import TrainingOptions, is_due, make_optimizer, resume
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
    evaluate: Callable[[], dict[str, float]],
    *,
    steps: int,
    weight_decay: float,
    **batches: Stateful,
) -> None:
    """Train from the last checkpoint to ``steps``; each evaluation is logged and makes a checkpoint.

    Args:
        options: of the run.
        checkpoints: of the run.
        loss: to minimize.
        sample: the next batch.
        evaluate: figures of the model, the one that chooses the checkpoint among them.
        steps: number of training steps.
        weight_decay: of the optimizer.
        **batches: what a checkpoint has of the order of batches.
    """
    device = options.torch_device()
    optimizer, scheduler = make_optimizer(options, loss, steps, weight_decay=weight_decay)
    parts: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler}
    start, log = resume(options, checkpoints, {**parts, **batches, "random": RandomState()})
    finite = FiniteCheck()
    training = train_steps(
        loss,
        lambda: sample().to(device),
        optimizer,
        steps=steps,
        start=start,
        scheduler=scheduler,
        max_grad_norm=options.max_grad_norm,
        autocast=torch.bfloat16 if options.bf16 else None,
        finite=finite,
    )
    progress = Progress(steps, label=options.out.name, start=start, shown=("loss", checkpoints.best_by))
    with closing(log), progress:
        for step, figures in training:
            progress.update(step, figures)
            if is_due(step, options.log_every, steps):
                log.log(step, figures)
            if is_due(step, options.eval_every, steps):
                finite.check()
                check_parameters(loss, f"after step {step}")
                found = evaluate()
                log.log(step, found)
                progress.update(step, found)
                checkpoints.save(step, found)
