"""Offline training on a data set of games: the loop that the recipes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torchrl.objectives import LossModule, TargetNetUpdater
from transformers import CONFIG_MAPPING, PreTrainedModel

from torchrl_lang.data import RowDataset, best_rows, row_buffer
from torchrl_lang.modules import causal_lm, fit_vocabulary, language_actor, load_causal_lm, train_top_layers
from torchrl_lang.recipes.options import check_record, option, required, write_options
from torchrl_lang.recipes.runs import RunOptions, finish, is_due, make_optimizer, resume, run_folder
from torchrl_lang.recipes.tasks import Task
from torchrl_lang.recipes.unfrozen import Unfrozen
from torchrl_lang.training import (
    Checkpointer,
    FiniteCheck,
    Progress,
    RandomState,
    check_parameters,
    train_steps,
)

__all__ = ["TEXTWORLD", "OfflineOptions", "build_actor", "build_lm", "train_offline"]


@dataclass(frozen=True)
class OfflineOptions(RunOptions):
    """Options of every recipe that learns from a data set."""

    data: Path = required("folder of a data set, see `generate`")
    out: Path = required("folder of the run; a run that is there already is continued")
    steps: int = option(8000, "optimiser steps", at_least=1)
    batch_size: int = option(64, "games in a batch", at_least=1)
    lr: float = option(2e-3, "peak learning rate of AdamW; Muon's is ten times that", above=0, at_most=1)
    warmup: int = option(100, "steps until the peak, at most a tenth of all", at_least=0)
    final_lr: float = option(0.05, "learning rate at the end, as a share of the peak", at_least=0, at_most=1)
    optimizer: Literal["muon", "adamw"] = option("muon", "muon: for matrices, with AdamW for the rest")
    weight_decay: float = option(0.01, "AdamW's weight decay", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm", above=0)
    fraction: float = option(1.0, "share of best episodes to learn from (percent BC)", above=0, at_most=1)
    pretrained: str | None = option(
        None, "name or folder of a Hugging Face model to start from, instead of from scratch"
    )
    kind: str = option("gpt2", "Hugging Face model type of a model from scratch")
    layers: int = option(3, "transformer blocks of a model from scratch", at_least=1)
    width: int = option(64, "its width", at_least=1)
    heads: int = option(4, "its attention heads", at_least=1)
    length_groups: int | None = option(
        None,
        "groups of similar length that a batch is run in, to compute less padding; none takes what costs least",
        at_least=1,
    )
    device: str = option("auto", "cpu, cuda, ...; auto takes a GPU where there is one")
    bf16: bool = option(False, "compute in bfloat16")
    compile: bool = option(False, "compile the model (needs a C++ compiler; slow to start; pays on GPUs)")
    checkpointing: bool = option(False, "recompute activations in the backward pass: slower, much less memory")
    top_layers: int | None = option(
        None, "train only so many of the last transformer blocks; none trains all", at_least=1
    )
    eval_every: int = option(1000, "steps between evaluations, each with a checkpoint", at_least=1)
    eval_games: int = option(256, "games an evaluation", at_least=1)
    log_every: int = option(50, "steps between rows of the log", at_least=1)
    logger: tuple[str, ...] = option((), "further loggers: tensorboard, wandb, mlflow, trackio")
    seed: int = option(0, "seed of weights, batches and games", at_least=0)
    transition_weight: float = option(1.0, "weight of the environment's words in the policy's loss", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width} and heads={self.heads}.")


TEXTWORLD: Mapping[str, Any] = {
    "steps": 700,
    # The engine's words are many, and what they say of one game is of no use in the next.
    "transition_weight": 0.05,
    "weight_decay": 0.05,
    "batch_size": 32,
    "eval_every": 350,
    "eval_games": 64,
}
"""Defaults of the recipes' options that suit TextWorld's games."""


def build_lm(options: OfflineOptions, dataset: RowDataset) -> PreTrainedModel:
    """The language model: from scratch, or a pretrained one fitted to the tokenizer."""
    tokenizer = dataset.tokenizer
    if options.pretrained is not None:
        lm = load_causal_lm(options.pretrained)
        return fit_vocabulary(lm, tokenizer.vocab_size, shrink=True).to(options.torch_device())
    if options.kind not in CONFIG_MAPPING:
        raise ValueError(f"kind={options.kind!r} is no model type of Hugging Face: give gpt2, llama, qwen2 or another.")
    lm = causal_lm(
        options.kind,
        vocab_size=tokenizer.vocab_size,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        max_length=dataset.rows["tokens"].shape[-1],
        pad=tokenizer.control.pad,
        # Hugging Face's 0.02 is made for widths near a thousand; a narrow model starts near silence with it.
        initializer_range=options.width**-0.5,
    )
    return lm.to(options.torch_device())


def build_actor(options: OfflineOptions, lm: PreTrainedModel) -> ProbabilisticTensorDictSequential:
    """The language model as an actor, run and frozen as the options say."""
    groups: Any = "auto" if options.length_groups is None else options.length_groups
    actor = language_actor(lm, length_groups=groups, compile=options.compile)
    if options.checkpointing:
        actor[0].module.gradient_checkpointing()
    if options.top_layers is not None:
        train_top_layers(actor, options.top_layers)
    return actor


def train_offline(
    options: OfflineOptions,
    dataset: RowDataset,
    task: Task,
    loss: LossModule,
    policy: TensorDictModuleBase,
    save: Callable[[Path], Any],
    *,
    target_updater: TargetNetUpdater | None = None,
) -> float:
    """Train, evaluate, checkpoint; at the end the best checkpoint by return becomes the run's model.

    The run's folder holds ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. A run that was
    killed goes on from its last checkpoint, to the same numbers as one that was not. One process at a time trains in a
    folder.

    Args:
        options: of the recipe.
        dataset: games to learn from.
        task: how the policy is judged.
        loss: what is minimised.
        policy: what is judged; shares its weights with the loss.
        save: writes the trained model to a folder.
        target_updater: moves the loss's target parameters.

    Returns:
        The best mean return of the evaluations.

    Raises:
        FileExistsError: another process trains in this folder.
        NonFiniteError: a loss, a gradient or a weight has become NaN or infinite; earlier checkpoints stay.
    """
    with run_folder(options.out):
        checkpoints = Checkpointer(options.out / "checkpoints")
        _record(options, dataset, continued=bool(checkpoints.steps()))
        _train(options, dataset, task, loss, policy, checkpoints, target_updater)
        return finish(options, checkpoints, save, unit="step")


def _train(
    options: OfflineOptions,
    dataset: RowDataset,
    task: Task,
    loss: LossModule,
    policy: TensorDictModuleBase,
    checkpoints: Checkpointer,
    target_updater: TargetNetUpdater | None,
) -> None:
    """All steps that are left."""
    device = options.torch_device()
    rows = dataset if options.fraction == 1.0 else best_rows(dataset, fraction=options.fraction)
    buffer = row_buffer(rows, options.batch_size, seed=options.seed)
    optimizer, scheduler = make_optimizer(options, loss, options.steps, weight_decay=options.weight_decay)
    parts: dict[str, Any] = {
        "loss": Unfrozen(loss),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": buffer.sampler,
        "random": RandomState(),
    }
    start, log = resume(options, checkpoints, parts)
    finite = FiniteCheck()
    training = train_steps(
        loss,
        lambda: buffer.sample().to(device),
        optimizer,
        steps=options.steps,
        start=start,
        scheduler=scheduler,
        target_updater=target_updater,
        max_grad_norm=options.max_grad_norm,
        autocast=torch.bfloat16 if options.bf16 else None,
        finite=finite,
    )
    progress = Progress(options.steps, label=options.out.name, start=start, shown=("loss", "return"))
    with closing(log), progress:
        for step, figures in training:
            progress.update(step, figures)
            if is_due(step, options.log_every, options.steps):
                log.log(step, figures)
            if is_due(step, options.eval_every, options.steps):
                finite.check()
                check_parameters(loss, f"after step {step}")
                summary, _ = task.judge(policy, games=options.eval_games, seed=options.seed + 1, device=device)
                log.log(step, summary.scalars())
                progress.update(step, {"return": summary.mean_return})
                checkpoints.save(step, summary.scalars())


def _record(options: OfflineOptions, dataset: RowDataset, *, continued: bool) -> None:
    """Write down what the run is, or make sure that what is to be continued is the same."""
    notes, manifest = dataset.manifest["notes"], dataset.manifest
    contents = {key: entry["sha256"] for key, entry in manifest["entries"].items()}
    path = options.out / "config.json"
    if continued:
        check_record(
            path,
            options,
            free=("data", "out", "logger", "device", "length_groups", "compile", "checkpointing"),
            notes=notes,
            dataset=contents,
        )
    else:
        write_options(path, options, notes=notes, dataset=contents)
