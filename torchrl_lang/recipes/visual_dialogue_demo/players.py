"""Players of trained runs: the decoding is chosen on validation scenes, and plays the test scenes once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.visual_dialogue.yes_no import PENALTIES, Penalty
from torchrl_lang.recipes.load_run import FinishedRun, load_run
from torchrl_lang.recipes.offline_methods import METHODS, decodings
from torchrl_lang.recipes.tasks.visual_dialogue import VisualDialogueTask
from torchrl_lang.recipes.visual_dialogue_demo.played import PlayedDialogues
from torchrl_lang.storage import read_json, write_json

__all__ = ["CHOICE", "REPORT", "UNGUIDED", "TrainedPlayer", "play"]

CHOICE, REPORT = ("val", 1_000_000), ("test", 2_000_000)
"""Split on which the decoding is chosen, and the one that is reported, each with the seed of sampling there."""

UNGUIDED = "greedy, beta 0"
"""The decoding of a run with values that leaves them out: a row of its own, never chosen."""


def play(
    task: VisualDialogueTask, policy: Any, games: int, seed: int, *, on: tuple[str, int] = REPORT
) -> PlayedDialogues:
    """Play the first scenes of a split, each once; at most all."""
    split, first = on
    games = min(games, task.number_of_games(split))
    _, records = task.evaluate(policy, split=split, games=games, seed=first + seed)
    return PlayedDialogues.from_records(records, task.tokenizer())


@dataclass(frozen=True)
class TrainedPlayer:
    """A finished run, what was measured with it, and its dialogues; all are kept in the run's folder.

    Args:
        folder: of the run.
        method: its name in :data:`METHODS`.
        seed: of its training.
        choice_games: validation scenes on which the decoding is chosen.
        eval_games: test scenes.
    """

    folder: Path
    method: str
    seed: int
    choice_games: int
    eval_games: int
    _played: dict[str, PlayedDialogues] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def finished(self) -> FinishedRun:
        """The run, opened when it is first needed."""
        return load_run(self.folder)

    @cached_property
    def policies(self) -> Mapping[str, TensorDictModuleBase]:
        """All ways to decode it, by name."""
        finished, by_values = self.finished, METHODS[self.method].by_values
        ways = dict(decodings(finished, by_values=by_values))
        if by_values and finished.has_values and finished.decoding.include_logits:
            ways = {UNGUIDED: finished.policy(method="greedy"), **ways}
        return ways

    @cached_property
    def choice(self) -> Mapping[str, Mapping[str, float]]:
        """The mean return of each decoding on validation scenes, by penalty."""
        path = self.folder / "choice.json"
        if not path.exists():
            task: Any = self.finished.task
            found = {
                name: play(task, policy, self.choice_games, self.seed, on=CHOICE)
                for name, policy in self.policies.items()
            }
            write_json(path, {name: {each: one.mean_return(each) for each in PENALTIES} for name, one in found.items()})
        return read_json(path, remedy="delete it: the validation scenes are played again")

    @property
    def decodings(self) -> list[str]:
        """All that may be chosen."""
        return [name for name in self.choice if name != UNGUIDED]

    def best(self, penalty: Penalty) -> str:
        """The decoding with the highest return on validation scenes; of equal ones the first."""
        return max(self.decodings, key=lambda name: self.choice[name][penalty])

    def test(self, decoding: str) -> PlayedDialogues:
        """The dialogues about the test scenes."""
        if decoding not in self._played:
            path = self.folder / "test" / f"{decoding.replace(',', '').replace(' ', '_')}.json"
            if not path.exists():
                task: Any = self.finished.task
                played = play(task, self.policies[decoding], self.eval_games, self.seed)
                played.save(path)
                print(f"played {self.folder.name} {decoding}: {len(played)} test scenes", flush=True)
            self._played[decoding] = PlayedDialogues.load(path)
        return self._played[decoding]
