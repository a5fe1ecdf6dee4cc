"""What all training runs share: options, optimizer, checkpoints, and how a run starts, resumes and ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import LossModule

from torchrl_lang._files import folder_lock, remove_leftovers
from torchrl_lang.recipes.algorithms import TrainingOptions
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.options import check_record, write_config, write_options
from torchrl_lang.training import Checkpointer, RunLog, Stateful, adamw, make_log, muon_adamw, warmup_cosine

__all__ = [
    "FREE_OPTIONS",
    "finish",
    "is_due",
    "make_optimizer",
    "open_run",
    "resume",
]

FREE_OPTIONS = ("out", "logger", "device", "task", "option")
"""Options that may change when any run is resumed; the task is among the notes."""


@contextmanager
def open_run(
    options: TrainingOptions, *, free: tuple[str, ...], fixed: Mapping[str, Any], best_by: str = "return", **more: Any
) -> Iterator[Checkpointer]:
    """Hold the folder of a run exclusively and record its options, or check that a resumed run has the same ones.

    The ``free`` options may change when a run is resumed. ``fixed`` and ``more`` are further content of
    ``config.json``; what is ``fixed``, the task among it, may not change. The best checkpoint has the
    highest ``best_by``.
    """
    check_place(options.out)
    with folder_lock(options.out, "trains"):
        remove_leftovers(options.out)
        checkpoints, record = Checkpointer(options.out / "checkpoints", best_by=best_by), options.out / "config.json"
        free = (*FREE_OPTIONS, *free)
        if checkpoints.steps():
            check_record(record, options, free=free, **fixed)
        else:
            write_options(record, options, **fixed, **more)
            write_config(options.out / "config.yaml", options)
        yield checkpoints


def make_optimizer(
    options: TrainingOptions, loss: LossModule, steps: int, **settings: Any
) -> tuple[Optimizer, LRScheduler]:
    """The optimizer, and its schedule of warmup and decay over ``steps`` steps."""
    make = muon_adamw if options.optimizer == "muon" else adamw
    optimizer = make(loss, options.lr, **settings)
    warmup = min(options.warmup, steps // 10)
    return optimizer, warmup_cosine(optimizer, steps, warmup=warmup, final=options.final_lr)


def resume(
    options: TrainingOptions,
    checkpoints: Checkpointer,
    parts: Mapping[str, Stateful],
    *,
    optional: Collection[str] = (),
) -> tuple[int, RunLog]:
    """Restore ``parts`` from the last checkpoint. Returns the number of completed steps, and the log up to there.

    Checkpoints of older versions may lack the ``optional`` ones.
    """
    for name, part in parts.items():
        checkpoints.register(name, part, optional=name in optional)
    done = checkpoints.restore() or 0
    log = make_log(options.out, trackers=options.logger)
    log.rewind(done or None)
    return done, log


def is_due(step: int, every: int, last: int) -> bool:
    """Whether ``step`` is a multiple of ``every`` or the last one."""
    return step % every == 0 or step == last


def finish(
    options: TrainingOptions,
    checkpoints: Checkpointer,
    save: Callable[[Path], Any],
    *,
    unit: str,
    describe: Callable[[float], str] = "mean return {:.2f}".format,
) -> float:
    """Save the best checkpoint as the run's model, the last one if none has the metric. Returns the best metric or NaN.

    Args:
        options: of the run.
        checkpoints: of the run.
        save: writes the restored model to a folder.
        unit: of the checkpoints' steps.
        describe: the best metric in words.
    """
    checkpoints.prune()  # a run that was killed in its last save still has the old ones
    best = checkpoints.restore("best")
    found = checkpoints.metrics("best").get(checkpoints.best_by, math.nan)
    chosen = f"best at {unit} {best}, {describe(found)}"
    if best is None:
        chosen = f"last checkpoint at {unit} {checkpoints.restore()}, as no figure was measured to choose by"
    model = options.out / "model"
    save(model)
    print(f"{options.out.name}: {chosen}; model in {model}", flush=True)
    return found
