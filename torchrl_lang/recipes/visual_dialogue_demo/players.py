"""Players of trained runs: the decoding is chosen on validation scenes, and plays the test scenes once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.visual_dialogue.rewards import PENALTIES, Penalty
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.recipes.compare import CHOICE, METHODS, REPORT, TrainedPlayer, decodings
from torchrl_lang.recipes.visual_dialogue_demo.played import PlayedDialogues

__all__ = ["UNGUIDED", "DialoguePlayer", "play"]

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
class DialoguePlayer(TrainedPlayer[PlayedDialogues]):
    """A finished run and its dialogues about the test scenes.

    Args:
        folder, method: as in :class:`TrainedPlayer`.
        seed: of its training.
        choice_games: validation scenes on which the decoding is chosen.
        eval_games: test scenes.
    """

    remedy = "delete it: the validation scenes are played again"

    seed: int
    choice_games: int
    eval_games: int

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; where values guide it, also without them."""
        finished, by_values = self.finished, METHODS[self.method].by_values
        if by_values and finished.has_values and finished.decoding.include_logits:
            yield UNGUIDED, finished.policy(method="greedy")
        yield from decodings(finished, by_values=by_values)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, float]:
        """The mean return on validation scenes, by penalty."""
        played = play(self._task, policy, self.choice_games, self.seed, on=CHOICE)
        return {penalty: played.mean_return(penalty) for penalty in PENALTIES}

    def play(self, policy: TensorDictModuleBase) -> PlayedDialogues:
        """The dialogues about the test scenes."""
        return play(self._task, policy, self.eval_games, self.seed)

    def load(self, path: Path) -> PlayedDialogues:
        """Read dialogues."""
        return PlayedDialogues.load(path)

    def announce(self, decoding: str, games: PlayedDialogues) -> None:
        """Print how many scenes were played."""
        print(f"played {self.folder.name} {decoding}: {len(games)} test scenes", flush=True)

    @property
    def _task(self) -> VisualDialogueTask:
        return cast(VisualDialogueTask, self.finished.task)

    @property
    def decodings(self) -> list[str]:
        """All that may be chosen."""
        return [name for name in self.measured if name != UNGUIDED]

    def best(self, penalty: Penalty) -> str:
        """The decoding with the highest return on validation scenes; of equal ones the first."""
        return max(self.decodings, key=lambda name: self.measured[name][penalty])
