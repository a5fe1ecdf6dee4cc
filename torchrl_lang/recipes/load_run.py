"""Open a finished run: its task, its model, and policies that act with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.data import Tokenizer, tokenizer_from_config
from torchrl_lang.modules import SavedModel, UtteranceActor, ValueGuidance, language_actor, load_language_model
from torchrl_lang.recipes.datasets import check_tokenizer
from torchrl_lang.recipes.options import read_options
from torchrl_lang.recipes.tasks import task_from_notes
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.storage import Fields, FileError

__all__ = ["BETAS", "FinishedRun", "Method", "load_run"]

BETAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Weights of the values that :meth:`FinishedRun.choose_beta` tries."""

Method = Literal["sample", "greedy", "beam", "best_of"]


@dataclass(frozen=True)
class FinishedRun:
    """The result of a training run."""

    task: Task
    model: SavedModel
    tokenizer: Tokenizer
    values_note: str = ""
    """What the run's held-out check found about its values, one sentence; empty where it was not made."""

    @property
    def has_values(self) -> bool:
        """Whether the run learned Q values."""
        return "target_qvalue" in self.model.heads

    def policy(
        self, beta: float = 0.0, *, method: Method = "sample", seed: int | None = None, **options: Any
    ) -> UtteranceActor:
        """The policy, a :class:`~torchrl_lang.modules.UtteranceActor` with these and further ``options``.

        With ``beta`` above 0 it is guided by the learned values. ``"best_of"`` chooses by the learned value of the
        whole utterance, and without values by its probability.

        Raises:
            ValueError: ``beta`` is not 0 and the run has no values.
        """
        if beta and not self.has_values:
            raise ValueError(f"This run learned no values, so beta={beta} has nothing to weigh: leave beta at 0.")
        by_value = method == "best_of" and self.has_values
        guidance = ValueGuidance(self.model.heads["target_qvalue"], beta=beta) if beta or by_value else None
        ranking = {"end_value_weight": 1.0, "log_prob_weight": 0.0} if by_value else {}
        return UtteranceActor(
            language_actor(self.model.lm),
            self.tokenizer.control,
            self.task.action_length,
            guidance=guidance,
            method=method,
            seed=seed,
            diagnostics=True,
            **{**ranking, **options},
        )

    def choose_beta(self, *, seed: int, games: int = 250, betas: Sequence[float] = BETAS) -> dict[float, float]:
        """Play games greedily with each weight of the values, on games that no result is reported on.

        Give another ``seed`` than that of the games that are reported. Returns the mean return of each weight, the
        best one first; of equal ones the smaller weight.

        Raises:
            ValueError: the run has no values.
        """
        returns = {}
        for beta in sorted(betas):
            summary, _ = self.task.evaluate(self.policy(beta, method="greedy"), games=games, seed=seed)
            returns[beta] = summary.mean_return
        return dict(sorted(returns.items(), key=lambda item: -item[1]))


def load_run(folder: Path, given: type[Task] | None = None) -> FinishedRun:
    """Open the folder of a finished run, whose task is of the class ``given`` if it is not registered.

    Raises:
        FileNotFoundError: there is none, or it has not finished.
        ValueError: its record or its model is damaged, or its tokenizer is not the task's.
    """
    task = task_from_notes(read_options(folder / "config.json").object("notes"), given)
    if not (folder / "model").is_dir():
        raise FileNotFoundError(
            f"The run in {folder} has not finished, it has no model yet: continue it with the `train` command that "
            f"began it, with --out {folder} (its options are in {folder / 'config.json'})."
        )
    model = load_language_model(folder / "model")
    if model.tokenizer is None:
        raise FileError(folder / "model", "was saved without its tokenizer", "train again")
    try:
        tokenizer = tokenizer_from_config(model.tokenizer)
    except ValueError as error:
        raise FileError(folder / "model", f"has no tokenizer that can be read ({error})", "train again") from error
    check_tokenizer(task, tokenizer, folder / "model")
    values = folder / "values.json"
    remedy = "train again, or remove the file"
    note = Fields.read(values, remedy=remedy).take("summary", str) if values.is_file() else ""
    return FinishedRun(task, model, tokenizer, note)
