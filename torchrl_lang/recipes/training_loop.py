"""The training loop of recipes that learn from stored or drawn data; it logs, evaluates, saves and resumes exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.objectives import LossModule, TargetNetUpdater

from torchrl_lang.recipes.algorithms import LoopOptions
from torchrl_lang.recipes.run_common import finish, is_due, make_optimizer, resume
from torchrl_lang.recipes.stopping import stopping
from torchrl_lang.recipes.trainable_state import TrainableState
from torchrl_lang.training import (
    Checkpointer,
    FiniteCheck,
    Progress,
    RandomState,
    Stateful,
    WeightAverage,
    check_parameters,
    train_steps,
)

__all__ = ["train_and_evaluate"]


def train_and_evaluate(
    options: LoopOptions,
    checkpoints: Checkpointer,
    loss: LossModule,
    sample: Callable[[], TensorDictBase],
    evaluate: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]],
    save: Callable[[Path], Any],
    *,
    target_updater: TargetNetUpdater | None = None,
    shown: str | None = None,
    describe: Callable[[float], str] = "mean return {:.2f}".format,
    **batches: Stateful,
) -> float:
    """Train from the last checkpoint; each evaluation is logged and makes a checkpoint, the best becomes the model.

    SIGINT and SIGTERM end it after the step with a checkpoint, see :func:`~torchrl_lang.recipes.stopping.stopping`.

    Args:
        options: of the run.
        checkpoints: of the run.
        loss: to minimize.
        sample: the next batch.
        evaluate: figures of the model that are saved with its checkpoint, the one that chooses it among them, and
            further ones that are logged.
        save: writes the trained model to a folder.
        target_updater: updates the loss's target parameters.
        shown: the figure to show during training; default the one that chooses the checkpoint.
        describe: the figure that chooses the checkpoint, in words.
        **batches: what a checkpoint has of the order of batches.

    Returns:
        The best figure; the loss has the weights of the model then.
    """
    device, steps = options.torch_device(), options.steps
    optimizer, scheduler = make_optimizer(options, loss, steps, weight_decay=options.weight_decay)
    average = WeightAverage(loss, options.ema_decay) if options.ema_decay else None
    parts: dict[str, Any] = {"loss": TrainableState(loss), "optimizer": optimizer, "scheduler": scheduler}
    if average is not None:
        parts["average"] = average
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
    with closing(log), progress, stopping(checkpoints, "step") as asked_to_stop:
        for step, figures in training:
            if average is not None:
                average.update()
            progress.update(step, figures)
            if is_due(step, options.log_every, steps):
                log.log(step, figures)
            evaluates, stops = is_due(step, options.eval_every, steps), asked_to_stop()
            if not (evaluates or stops):
                continue
            finite.check()
            check_parameters(loss, f"after step {step}")
            found: Mapping[str, float] = {}
            if evaluates:
                with nullcontext() if average is None else average.applied():
                    found, further = evaluate()
                log.log(step, {**found, **further})
                progress.update(step, {**found, **further})
            checkpoints.save(step, found)
            if stops:
                break

    def save_chosen(folder: Path) -> None:
        if average is not None:
            average.apply()
        save(folder)

    return finish(options, checkpoints, save_chosen, unit="step", describe=describe)
