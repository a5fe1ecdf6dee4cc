"""Train a model on learning histories: algorithm distillation, or expert distillation with ``--source expert``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_lang.algorithm_distillation import evaluate_in_context
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.recipes.algorithm_distillation.families import TaskFamily
from torchrl_lang.recipes.algorithm_distillation.formats import FORMATS, Format, FormatOptions, RLFormat
from torchrl_lang.recipes.algorithm_distillation.histories import history_windows, recording_of
from torchrl_lang.recipes.algorithms import LoopOptions
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.run_common import open_run
from torchrl_lang.recipes.training_loop import train_and_evaluate

__all__ = ["AD", "main"]

_OF_RL_LOSS = ("label_smoothing", "reward_weight", "observation_weight")

_LAST = 3
"""Number of the last episodes whose mean return chooses the checkpoint."""


@with_defaults(lr=2e-3, optimizer="adamw", warmup=20, final_lr=0.02, eval_every=400, steps=400, weight_decay=0.05)
class AD(LoopOptions, FormatOptions):
    """Algorithm distillation on tasks with a hidden parameter; new histories are drawn while it trains.

    The command line has other defaults with ``--format language``: 1,000 steps of 32 windows of 3 episodes, and Muon.
    """

    algorithm: ClassVar[str] = "ad"
    of_language: ClassVar[Mapping[str, Any]] = {
        **FormatOptions.of_language,
        "batch_size": 32,
        "lr": 3e-3,
        "optimizer": "muon",
        "steps": 1000,
    }

    batch_size: int = option(64, "windows in a batch", at_least=1)
    label_smoothing: float = option(0.0, "share of an action's target that is uniform", at_least=0, below=1)
    reward_weight: float = option(0.0, "weight of the loss of predicted rewards", at_least=0)
    observation_weight: float = option(0.0, "weight of the loss of predicted observations", at_least=0)
    episodes: int = option(20, "episodes of an evaluation on validation tasks", at_least=_LAST)
    eval_streams: int = option(16, "streams of each task in an evaluation", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "language" and (given := [name for name in _OF_RL_LOSS if getattr(self, name)]):
            raise ValueError(f"{' and '.join(given)} are for the RL format's loss: leave them out.")


def main(options: AD) -> float:
    """Train; returns the best mean return of the last episodes on validation tasks.

    The run's folder contains ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. The same command
    continues a run that was killed, and ends with the same numbers.
    """
    family = options.family()
    torch.manual_seed(options.seed)
    length = options.context_episodes * family.episode_length
    format = FORMATS[options.format].new(options, family)
    format.model.to(options.torch_device())
    weights = {name: getattr(options, name) for name in _OF_RL_LOSS}
    loss = format.loss(**weights) if isinstance(format, RLFormat) else format.loss()
    described, recording = family.describe(), recording_of(options)
    fixed = {"family": described, "history_digest": None if recording is None else recording.digest}
    with open_run(options, free=("history",), fixed=fixed) as checkpoints:
        windows = history_windows(options, length=length, batch_size=options.batch_size, seed=options.seed)
        source = options.source_name() if recording is None else recording.source
        trained_on = {"family": described, "source": source, "options": _jsonable(options)}
        return train_and_evaluate(
            options,
            checkpoints,
            loss,
            lambda: format.batch(windows.sample()),
            lambda: (_evaluate(options, family, format), {}),
            lambda folder: format.save(folder, trained_on),
            windows=windows,
        )


def _evaluate(options: AD, family: TaskFamily, format: Format) -> dict[str, float]:
    """The mean return of the last episodes and of the first one on validation tasks."""
    env = family.env(family.split.validation, options.eval_streams)
    with eval_mode(format.model):
        policy = format.policy(options.temperature)
        returns: Tensor = evaluate_in_context(env, policy, options.episodes, seed=options.seed)
    return {"return": float(returns[..., -_LAST:].mean()), "first_return": float(returns[..., 0].mean())}


def _jsonable(options: AD) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
