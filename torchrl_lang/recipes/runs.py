"""What all training runs have in common, whatever they learn from: how they begin, go on and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import LossModule

from torchrl_lang.functional.checks import one_of
from torchrl_lang.recipes.options import Options
from torchrl_lang.recipes.tasks import check_place
from torchrl_lang.storage import folder_lock, remove_leftovers
from torchrl_lang.training import (
    LOGGERS,
    Checkpointer,
    RunLog,
    Stateful,
    adamw,
    make_log,
    muon_adamw,
    warmup_cosine,
)

__all__ = ["RunOptions", "finish", "is_due", "make_optimizer", "resume", "run_folder"]


class RunOptions(Options):
    """What the options of every training run have; each recipe's dataclass says in which order, and the defaults."""

    out: Path
    lr: float
    warmup: int
    final_lr: float
    optimizer: Literal["muon", "adamw"]
    device: str
    logger: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.logger:
            one_of("logger", name, LOGGERS)
        try:
            torch.zeros(1, device=self.torch_device()).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises depends on the device
            raise ValueError(
                f"device={self.device!r} cannot be used here ({str(error).splitlines()[0]}): give auto, cpu, or cuda "
                "where there is a GPU."
            ) from error

    def torch_device(self) -> torch.device:
        """Where to compute."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        return torch.device(name)


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Train in ``folder`` while no other process does; what a killed process was writing there is deleted.

    Raises:
        FileExistsError: another process trains there.
        FileError: the folder is a file, or lies in a data set.
    """
    check_place(folder)
    with folder_lock(folder, "trains"):
        remove_leftovers(folder)
        yield


def make_optimizer(options: RunOptions, loss: LossModule, steps: int, **settings: Any) -> tuple[Optimizer, LRScheduler]:
    """The optimiser that is asked for, and its warm-up and decay over ``steps`` steps of the schedule."""
    make = muon_adamw if options.optimizer == "muon" else adamw
    optimizer = make(loss, options.lr, **settings)
    warmup = min(options.warmup, steps // 10)
    return optimizer, warmup_cosine(optimizer, steps, warmup=warmup, final=options.final_lr)


def resume(options: RunOptions, checkpoints: Checkpointer, parts: Mapping[str, Stateful]) -> tuple[int, RunLog]:
    """Put ``parts`` where the last checkpoint left them. Returns the steps done, and the log as it stood then."""
    for name, part in parts.items():
        checkpoints.register(name, part)
    done = checkpoints.restore() or 0
    log = make_log(options.out, trackers=options.logger)
    log.rewind(done or None)
    return done, log


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done ``every`` so many steps, and at the last one, is to be done now."""
    return step % every == 0 or step == last


def finish(options: RunOptions, checkpoints: Checkpointer, save: Callable[[Path], Any], *, unit: str) -> float:
    """Save the best checkpoint by return as the run's model, whole or not at all. Returns its mean return."""
    best = checkpoints.restore("best")
    model = options.out / "model"
    save(model)
    found = checkpoints.metrics("best")["return"]
    print(f"{options.out.name}: best at {unit} {best}, mean return {found:.2f}; model in {model}", flush=True)
    return found
