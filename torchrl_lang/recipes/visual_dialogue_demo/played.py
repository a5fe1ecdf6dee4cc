"""Played dialogues as a file, and what every reward gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._files import FileError, read_json, write_json
from torchrl_lang.envs.visual_dialogue import DialogueRewards, Round
from torchrl_lang.envs.visual_dialogue.env import PROGRESS
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.rewards import Penalty
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask, rounds_of
from torchrl_lang.evaluation import GameRecords, Summary
from torchrl_lang.text import Tokenizer

__all__ = ["PlayedDialogues", "rewards_under"]


def rewards_under(penalty: Penalty) -> DialogueRewards:
    """The rewards of mode "env_stops" with a penalty."""
    return DialogueRewards(penalty=penalty)


@dataclass(frozen=True)
class PlayedDialogues:
    """Dialogues of one player in mode "env_stops": the penalty changes what they earn, but not when they end.

    So the returns under all rewards come from the same dialogues.
    """

    rounds: Sequence[Sequence[Round]]
    """Questions and replies of each dialogue."""
    progress: Tensor
    """float32 ``[N, 11]``: the percentile after the caption, and its change in each round, then zeros."""
    terminated: Sequence[bool]
    """Whether a dialogue ended, as against a row that was too short for it."""

    def __len__(self) -> int:
        return len(self.rounds)

    @classmethod
    def from_records(cls, records: GameRecords, tokenizer: Tokenizer) -> PlayedDialogues:
        """Those that :meth:`VisualDialogueTask.evaluate` played."""
        return cls(rounds_of(records, tokenizer), records.kept[PROGRESS], records.terminated.tolist())

    @classmethod
    def of_dataset(cls, task: VisualDialogueTask, split: str, games: int) -> PlayedDialogues:
        """The first dialogues of a split's files, cut where they end."""
        scenes = task.data(split).scenes(task.rewards)[:games]
        progress = torch.zeros(len(scenes), 1 + ROUNDS)
        for place, scene in enumerate(scenes):
            values = (scene.initial, *scene.progress)
            progress[place, : len(values)] = torch.tensor(values)
        return cls([scene.dialogue.rounds for scene in scenes], progress, [True] * len(scenes))

    @classmethod
    def load(cls, path: Path) -> PlayedDialogues:
        """Read what :meth:`save` wrote.

        Raises:
            FileError: the file is damaged.
        """
        remedy = "delete it: the dialogues are played again"
        content = read_json(path, remedy=remedy)
        try:
            rounds = [[Round(*each) for each in dialogue] for dialogue in content["rounds"]]
            progress = torch.tensor(content["progress"]).reshape(len(rounds), 1 + ROUNDS)
            return cls(rounds, progress, [bool(ended) for ended in content["terminated"]])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FileError(path, f"holds no played dialogues ({error})", remedy) from error

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        content = {"rounds": self.rounds, "progress": self.progress.tolist(), "terminated": self.terminated}
        write_json(path, content)

    @staticmethod
    def join(parts: Sequence[PlayedDialogues]) -> PlayedDialogues:
        """The dialogues of several plays, one after the other."""
        rounds = [dialogue for part in parts for dialogue in part.rounds]
        ended = [dialogue for part in parts for dialogue in part.terminated]
        return PlayedDialogues(rounds, torch.cat([part.progress for part in parts]), ended)

    def question_rewards(self, penalty: Penalty) -> list[list[float]]:
        """The reward of each question of each dialogue."""
        rewards = rewards_under(penalty)
        found = []
        for dialogue, changes, ended in zip(self.rounds, self.progress[:, 1:].tolist(), self.terminated, strict=True):
            places = range(1, len(dialogue) + 1)
            found.append(
                [
                    rewards.question(change, each.answer, last=ended and place == len(dialogue))
                    for place, each, change in zip(places, dialogue, changes, strict=False)
                ]
            )
        return found

    def returns(self, penalty: Penalty) -> Tensor:
        """The return of each dialogue, float32 ``[N]``."""
        return torch.tensor([sum(rewards) for rewards in self.question_rewards(penalty)])

    def mean_return(self, penalty: Penalty) -> float:
        """Mean over the dialogues."""
        return float(self.returns(penalty).double().mean())

    def summary(self, name: str, task: VisualDialogueTask, penalty: Penalty) -> Summary:
        """What :meth:`VisualDialogueTask.summary` measures, with the return under a penalty."""
        each = self.question_rewards(penalty)
        ended, turns = torch.tensor(self.terminated), torch.tensor([len(rewards) for rewards in each])
        records = GameRecords(
            rows=TensorDict(batch_size=[len(self)]),
            returns=self.returns(penalty),
            turns=turns,
            terminated=ended,
            truncated=~ended,
            last_reward=torch.tensor([rewards[-1] if rewards else 0.0 for rewards in each]),
            agent_tokens=torch.zeros_like(turns),
            kept=TensorDict({PROGRESS: self.progress}, batch_size=[len(self)]),
        )
        return replace(task.summary_of(records, self.rounds, name), guesses={})  # of games that have guesses
