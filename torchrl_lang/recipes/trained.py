"""A trained run as a player again: for evaluation, for watching, for the demo's table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.data import Tokenizer, tokenizer_from_config
from torchrl_lang.modules import SavedModel, UtteranceActor, ValueGuidance, language_actor, load_language_model
from torchrl_lang.recipes.options import read_options
from torchrl_lang.recipes.tasks import Task, check_words, task_from_notes
from torchrl_lang.storage import FileError

__all__ = ["Trained", "load_run"]

Method = Literal["sample", "greedy", "beam", "best_of"]


@dataclass(frozen=True)
class Trained:
    """What a finished run left behind."""

    task: Task
    model: SavedModel
    tokenizer: Tokenizer

    @property
    def has_values(self) -> bool:
        """Whether values were learned that can steer the words."""
        return "target_qvalue" in self.model.heads

    def policy(
        self, beta: float = 0.0, *, method: Method = "sample", seed: int | None = None, **options: Any
    ) -> UtteranceActor:
        """The player; ``beta`` above 0 lets the learned values steer it.

        Raises:
            ValueError: values are asked for and the run has none.
        """
        guidance = None
        if beta:
            if not self.has_values:
                raise ValueError(f"This run learned no values, so beta={beta} has nothing to weigh: leave beta at 0.")
            guidance = ValueGuidance(self.model.heads["target_qvalue"], beta=beta)
        actor = language_actor(self.model.lm)
        return UtteranceActor(
            actor,
            self.tokenizer.control,
            self.task.action_length,
            guidance=guidance,
            method=method,
            seed=seed,
            diagnostics=True,
            **options,
        )


def load_run(folder: Path) -> Trained:
    """Open the folder of a finished run.

    Raises:
        FileNotFoundError: there is none, or it has not finished.
        ValueError: its record or its model is damaged, or the model reads other tokens than the task's.
    """
    task = task_from_notes(read_options(folder / "config.json").object("notes"))
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
    check_words(task, tokenizer, folder / "model")
    return Trained(task, model, tokenizer)
