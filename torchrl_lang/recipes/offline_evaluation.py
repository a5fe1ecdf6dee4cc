"""How an offline run evaluates what it learned: by games of its task, or by episodes that were held out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.evaluation import KnownValues
from torchrl_lang.recipes.tasks import DIALOGUES
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.schema import AGENT_MASK
from torchrl_lang.text import Episode

if TYPE_CHECKING:
    from torchrl_lang.recipes.offline import OfflineOptions

__all__ = ["Evaluation", "GamesEvaluation", "HeldOutEvaluation", "first_text", "longest_utterance"]


class Evaluation(ABC):
    """Evaluates a policy during training; the checkpoint with the highest :attr:`best_by` becomes the run's model."""

    best_by: str
    """The figure to choose the best checkpoint by."""
    shown: str
    """The figure to show during training."""

    @property
    @abstractmethod
    def action_length(self) -> int:
        """Number of tokens of an utterance, its end included."""

    @property
    def room(self) -> int:
        """Tokens that a model must be able to read beyond the rows of the data."""
        return 0

    @abstractmethod
    def notes(self) -> dict[str, Any]:
        """What a run records, so that it can be loaded."""

    @abstractmethod
    def figures(self, policy: Any, checked: Mapping[str, float], options: OfflineOptions) -> dict[str, float]:
        """Figures of a policy, to log and to choose by.

        Args:
            policy: to evaluate.
            checked: figures of the held-out rows; empty if there are none.
            options: of the run.
        """

    @abstractmethod
    def describe(self, best: float) -> str:
        """The best figure in words."""

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """See :meth:`Task.known_values`."""
        return []

    def next_steps(self, run: Path) -> str:
        """What a user can do with a finished run; empty where the commands show it."""
        return ""


@dataclass(frozen=True)
class GamesEvaluation(Evaluation):
    """Plays games of a task, and chooses by the mean return."""

    task: Task
    recorded: Mapping[str, Any]
    """Notes of the dataset, those of the task among them."""
    best_by = "return"
    shown = "return"

    @property
    def action_length(self) -> int:
        """See :meth:`Evaluation.action_length`."""
        return self.task.action_length

    def notes(self) -> dict[str, Any]:
        """See :meth:`Evaluation.notes`."""
        return dict(self.recorded)

    def figures(self, policy: Any, checked: Mapping[str, float], options: OfflineOptions) -> dict[str, float]:
        """Metrics of games."""
        device = options.torch_device()
        summary, _ = self.task.evaluate(policy, games=options.eval_games, seed=options.seed + 1, device=device)
        return summary.scalars()

    def describe(self, best: float) -> str:
        """The mean return."""
        return f"mean return {best:.2f}"

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """See :meth:`Task.known_values`."""
        return self.task.known_values(rows)


@dataclass(frozen=True)
class HeldOutEvaluation(Evaluation):
    """Chooses by the policy's loss of held-out episodes, where there is no environment; otherwise by no figure."""

    longest: int
    """Tokens of the longest utterance of the data."""
    example: str
    """How one of its dialogues begins; empty if the agent takes the first turn."""
    reads_features: bool = False
    """Whether the data have features beside their texts."""
    best_by = "held_out_log_prob"
    shown = "held_out_loss"

    @property
    def action_length(self) -> int:
        """See :meth:`Evaluation.action_length`."""
        return self.longest

    @property
    def room(self) -> int:
        """Another utterance after the longest dialogue."""
        return self.longest

    def notes(self) -> dict[str, Any]:
        """See :meth:`Evaluation.notes`."""
        return {"task": DIALOGUES, "action_length": self.longest}

    def figures(self, policy: Any, checked: Mapping[str, float], options: OfflineOptions) -> dict[str, float]:
        """The mean log-probability of the agent's held-out tokens, if it was measured."""
        return {self.best_by: -checked["held_out_loss"]} if "held_out_loss" in checked else {}

    def describe(self, best: float) -> str:
        """The loss."""
        return f"held-out loss {-best:.3f}"

    def next_steps(self, run: Path) -> str:
        """How to use the model in Python, and with an environment."""
        given = [repr(self.example)] * bool(self.example)
        given += ["features=..."] * self.reads_features  # a placeholder for float [n, F]
        return (
            "This run has no environment. Ask the policy for an answer in Python:\n"
            "    from pathlib import Path\n"
            "    from torchrl_lang.recipes.load_run import load_run\n"
            f"    run = load_run(Path({str(run)!r}))\n"
            f"    print(run.reply({', '.join(given)}))\n"
            "or give `evaluate`, `play` and `train ppo` an environment with --task package.module:make_env.\n"
        )


def first_text(episode: Episode) -> str:
    """The beginning of the environment's first text, or an empty text if the agent takes the first turn."""
    first = episode.turns[0]
    return "" if first.by_agent else first.text[:60]


def longest_utterance(rows: TensorDictBase) -> int:
    """Number of tokens of the agent's longest utterance in rows ``[N, T]``, its end included; 0 if there is none.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.recipes.offline_evaluation import longest_utterance
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> longest_utterance(to_rows([Episode([Turn("a"), Turn("bcb", 1.0), Turn("c")], True)], tokenizer, 16))
        4
    """
    return max((_longest_run(part.get(AGENT_MASK)) for part in rows.split(10_000)), default=0)


def _longest_run(mask: Tensor) -> int:
    """Length of the longest run of True along the last dimension."""
    position = torch.arange(mask.shape[-1])
    gap = torch.where(mask, -1, position).cummax(-1).values
    return int(torch.where(mask, position - gap, 0).amax())
