"""What all training runs share: options, optimizer, checkpoints, and how a run starts, resumes and ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import LossModule

from torchrl_lang._checks import one_of
from torchrl_lang._files import folder_lock, remove_leftovers
from torchrl_lang.recipes.config_file import write_config
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.options import Options, check_record, option, required, write_options
from torchrl_lang.recipes.task_options import TaskOptions
from torchrl_lang.training import LOGGERS, Checkpointer, RunLog, Stateful, adamw, make_log, muon_adamw, warmup_cosine

__all__ = [
    "FREE_OPTIONS",
    "RunOptions",
    "TrainingOptions",
    "finish",
    "is_due",
    "make_optimizer",
    "open_run",
    "resume",
]

FREE_OPTIONS = ("out", "logger", "device", "task", "option")
"""Options that may change when any run is resumed; the task is among the notes."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Options of all training runs, whatever they train."""

    out: Path = required("folder of the run; an existing run is resumed")
    batch_size: int = option(64, "games in a batch", at_least=1)
    lr: float = option(2e-3, "peak learning rate of AdamW; Muon's is ten times that", above=0, at_most=1)
    warmup: int = option(100, "steps (online: iterations) until the peak, at most a tenth of all", at_least=0)
    final_lr: float = option(0.05, "learning rate at the end, as a share of the peak", at_least=0, at_most=1)
    optimizer: Literal["muon", "adamw"] = option("muon", "muon: for matrices, with AdamW for other parameters")
    max_grad_norm: float | None = option(1.0, "gradients are clipped to this norm; none: never", above=0)
    device: str = option("auto", "cpu, cuda, ...; auto takes a GPU if there is one")
    bf16: bool = option(False, "compute in bfloat16")
    eval_every: int = option(1000, "steps (online: iterations) between evaluations, each with a checkpoint", at_least=1)
    log_every: int = option(50, "steps (online: iterations) between rows of the log", at_least=1)
    logger: tuple[str, ...] = option((), "further loggers: tensorboard, wandb, mlflow, trackio")
    seed: int = option(0, "seed of weights, batches, games and sampling", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.logger:
            one_of("logger", name, LOGGERS)
        try:
            torch.zeros(1, device=self.torch_device()).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # the type depends on the device
            raise ValueError(
                f"device={self.device!r} cannot be used here ({str(error).splitlines()[0]}): give auto, cpu, or cuda "
                "where there is a GPU."
            ) from error

    def torch_device(self) -> torch.device:
        """The device to compute on."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        return torch.device(name)


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingOptions, TaskOptions):
    """Options of the training runs of language models."""

    top_layers: int | None = option(None, "number of transformer blocks to train, from the last; none: all", at_least=1)
    eval_games: int = option(256, "games in an evaluation", at_least=1)


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
