"""Offline training on a dataset: options, model and training loop of the offline recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torchrl.objectives import LossModule, TargetNetUpdater

from torchrl_lang._files import file_digest
from torchrl_lang.data import RowDataset, best_rows, load_dataset, row_buffer
from torchrl_lang.modules import SavedModel, train_top_layers
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.algorithms import OfflineOptions
from torchrl_lang.recipes.datasets import check_features, check_tokenizer, open_task
from torchrl_lang.recipes.dialogues import dialogue_dataset
from torchrl_lang.recipes.offline_evaluation import (
    Evaluation,
    GamesEvaluation,
    HeldOutEvaluation,
    first_text,
    longest_utterance,
)
from torchrl_lang.recipes.run_common import open_run
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.recipes.training_loop import train_and_evaluate
from torchrl_lang.schema import FEATURES

__all__ = [
    "OfflineData",
    "OfflineOptions",
    "build_actor",
    "evaluation_of",
    "held_out_rows",
    "number_to_train",
    "open_data",
    "train_offline",
]


@dataclass(frozen=True)
class OfflineData:
    """Episodes to learn from, and how a policy that learns from them is evaluated."""

    dataset: RowDataset
    evaluation: Evaluation
    record: Mapping[str, Any]
    """What a run records about them, and compares when it is resumed."""


def open_data(options: OfflineOptions) -> OfflineData:
    """Open the dataset, or make one of the dialogues in the run's folder.

    Without a task, neither given nor recorded, the policy is evaluated on held-out episodes.

    Raises:
        ValueError: there is no such task, or the data do not fit it or the options.
    """
    given, is_file = options.given_task(), options.data.is_file() or options.data.suffix == ".jsonl"
    if is_file:
        task = None if given is None else given.without_notes()
        dataset = dialogue_dataset(options, task)
    else:
        options.check_unused(options.data)
        dataset = load_dataset(options.data)
        task = open_task(dataset, given)
    evaluation = evaluation_of(dataset, task, options.data)
    contents = {key: entry["sha256"] for key, entry in dataset.manifest["entries"].items()}
    record: dict[str, Any] = {"notes": evaluation.notes(), "dataset": contents}
    return OfflineData(dataset, evaluation, record | ({"dialogues": file_digest(options.data)} if is_file else {}))


def evaluation_of(dataset: RowDataset, task: Task | None, source: Path) -> Evaluation:
    """How a policy that learned from the dataset is evaluated: in games of the task, or on held-out episodes.

    Raises:
        ValueError: there is no task and the agent takes no turn, or the task has another tokenizer or shows other
            features. The message names ``source``.
    """
    if task is None:
        evaluation = HeldOutEvaluation(
            longest_utterance(dataset.rows), first_text(dataset.episode(0)), FEATURES in dataset.rows.keys()
        )
        if not evaluation.action_length:
            raise ValueError(f"{source} has no turn of the agent to learn from.")
        return evaluation
    check_tokenizer(task, dataset.tokenizer, dataset.folder)
    if (features := dataset.rows.get(FEATURES, None)) is not None:
        check_features(task, features.shape[-1], dataset.folder)
    recorded = dataset.manifest["notes"]
    return GamesEvaluation(task, recorded if "task" in recorded else task.notes())


def build_actor(options: OfflineOptions, model: SavedModel) -> ProbabilisticTensorDictSequential:
    """The model as an actor, which reads features if it has a projector, compiled and frozen by the options."""
    groups: Any = "auto" if options.length_groups is None else options.length_groups
    actor = saved_actor(model, length_groups=groups, compile=options.compile)
    if options.checkpointing:
        actor[0].module.gradient_checkpointing()
    if options.top_layers is not None:
        train_top_layers(actor, options.top_layers)
    return actor


def held_out_rows(dataset: RowDataset, held_out: int) -> TensorDict:
    """The dataset's last ``held_out`` episodes, at most a tenth of it, which are not trained on."""
    return dataset[number_to_train(len(dataset), held_out) :]


def number_to_train(episodes: int, held_out: int) -> int:
    """How many of a dataset's episodes, its first ones, are trained on."""
    return episodes - min(held_out, episodes // 10)


def train_offline(
    options: OfflineOptions,
    data: OfflineData,
    loss: LossModule,
    policy: TensorDictModuleBase,
    save: Callable[[Path], Any],
    check: Callable[[TensorDictBase], Mapping[str, float]],
    *,
    target_updater: TargetNetUpdater | None = None,
    prepare: Callable[[TensorDictBase], TensorDictBase] = lambda rows: rows,
) -> float:
    """Train, evaluate and checkpoint; at the end the best checkpoint becomes the run's model.

    The run's folder contains ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. A run that was
    killed resumes from its last checkpoint and ends with the same numbers as an uninterrupted one. One process at a
    time trains in a folder.

    Args:
        options: of the recipe.
        data: episodes to learn from, and the evaluation.
        loss: to minimize.
        policy: to evaluate; shares its weights with the loss.
        save: writes the trained model to a folder.
        check: maps the held-out rows to numbers, logged with each evaluation.
        target_updater: updates the loss's target parameters.
        prepare: adds what the loss needs to the rows to train on, the same each time it is called.

    Returns:
        The best mean return of the evaluations, or without games the best held-out log-probability of a token.

    Raises:
        FileExistsError: another process trains in this folder.
        NonFiniteError: a loss, a gradient or a weight has become NaN or infinite; earlier checkpoints stay.
    """
    dataset, evaluation = data.dataset, data.evaluation
    free = ("data", "length_groups", "compile", "checkpointing")
    with open_run(options, free=free, fixed=data.record, best_by=evaluation.best_by) as checkpoints:
        kept = held_out_rows(dataset, options.held_out)
        rows = dataset.rows[: len(dataset) - len(kept)]
        if options.fraction < 1 or options.bottom_fraction < 1:
            rows = best_rows(rows, fraction=options.fraction, bottom_fraction=options.bottom_fraction)
        buffer = row_buffer(prepare(rows), options.batch_size, seed=options.seed)

        def evaluate() -> tuple[dict[str, float], dict[str, float]]:
            checked = dict(check(kept.to(options.torch_device()))) if len(kept) else {}
            return evaluation.figures(policy, checked, options), checked

        return train_and_evaluate(
            options,
            checkpoints,
            loss,
            buffer.sample,
            evaluate,
            save,
            target_updater=target_updater,
            shown=evaluation.shown,
            describe=evaluation.describe,
            sampler=buffer.sampler,
        )
