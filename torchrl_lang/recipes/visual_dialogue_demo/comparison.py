"""All players of the demo: under which reward each was trained and decoded, and its dialogues by training seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_lang.envs.visual_dialogue.rewards import Penalty, is_yes_no
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.evaluation import SeedSummary, Summary, over_seeds
from torchrl_lang.recipes.visual_dialogue_demo.played import PlayedDialogues

__all__ = ["Comparison", "Row", "cross_rewards"]


@dataclass(frozen=True)
class Row:
    """A player of a table: its dialogues about the test scenes, one play for each training seed."""

    title: str
    plays: Sequence[PlayedDialogues]
    decodings: Sequence[str] = ()
    """Of each training seed, as chosen on validation scenes; none for a player that was not trained."""
    imitates: bool = False
    """Whether it imitates the data."""

    @property
    def name(self) -> str:
        """The title, with the decoding if all seeds have the same."""
        return f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title

    @property
    def pooled(self) -> PlayedDialogues:
        """The dialogues of all seeds."""
        return PlayedDialogues.join(self.plays)

    def over_seeds(self, penalty: Penalty) -> SeedSummary:
        """The mean return under a penalty of each seed."""
        return over_seeds(self.name, [play.mean_return(penalty) for play in self.plays])

    def summary(self, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """Of the dialogues of all seeds; with several seeds the return's standard error is that over seeds."""
        summary, error = self.pooled.summary(self.name, task, penalty), self.over_seeds(penalty).error
        return summary if error is None else replace(summary, return_error=error)

    def asked_yes_no(self, penalty: Penalty) -> float:
        """Questions in a dialogue that were answered by yes or no, on average."""
        rounds = self.pooled.rounds
        return sum(is_yes_no(each.answer, penalty) for dialogue in rounds for each in dialogue) / len(rounds)

    def percentiles(self) -> list[float]:
        """Mean percentile after the caption and each round; a dialogue that has ended keeps its last."""
        return self.pooled.progress.double().cumsum(-1).mean(0).tolist()

    def final_percentile(self) -> tuple[float, float]:
        """Mean at the end of a dialogue, and its standard error."""
        last = self.pooled.progress.double().sum(-1)
        return float(last.mean()), float(last.std() / math.sqrt(len(last)))


@dataclass(frozen=True)
class Comparison:
    """What the demo found under one reward: its players, and the returns from which decodings were chosen."""

    penalty: Penalty
    rows: Sequence[Row]
    curves: Mapping[str, Mapping[str, Sequence[float]]]
    """For each method with weights of its values, the mean return on validation scenes by weight and seed."""

    def row(self, title: str) -> Row | None:
        """A player by its title."""
        return next((row for row in self.rows if row.title == title), None)

    def as_dict(self, task: VisualDialogueTask) -> dict[str, Any]:
        """All figures, for JSON."""
        players = {}
        for row in self.rows:
            seeds = row.over_seeds(self.penalty)
            players[row.title] = {
                **row.summary(task, self.penalty).as_dict(),
                "decodings": list(row.decodings),
                "returns_of_seeds": list(seeds.values),
                "interval_over_seeds": None if seeds.interval is None else list(seeds.interval),
                "percentile_by_round": row.percentiles(),
            }
        return {"players": players, "return_by_beta_on_validation_scenes": self.curves}


def cross_rewards(
    comparisons: Sequence[Comparison], task: VisualDialogueTask, title: str
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """A method trained (or only decoded) for one reward, evaluated under all: mean return and standard error.

    Returns:
        By the reward of training, then by that of the evaluation.
    """
    found: dict[str, dict[str, tuple[float, float | None]]] = {}
    for trained in comparisons:
        row = trained.row(title)
        if row is not None:
            summaries = {str(each.penalty): row.summary(task, each.penalty) for each in comparisons}
            found[str(trained.penalty)] = {name: (one.mean_return, one.return_error) for name, one in summaries.items()}
    return found
