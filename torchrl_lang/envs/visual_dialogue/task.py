"""Visual dialogue as a task of the recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchrl_lang._checks import checked
from torchrl_lang.data import PolicySampler
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs.visual_dialogue.data import SceneRows, VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import DialogueModels, Measure
from torchrl_lang.envs.visual_dialogue.env import PROGRESS, VisualDialogueEnv
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.play import QuestionPlayer, played_rounds, yes_no_rate
from torchrl_lang.envs.visual_dialogue.prepare import PreparedFolder
from torchrl_lang.envs.visual_dialogue.protocol import RemoteModels
from torchrl_lang.envs.visual_dialogue.rewards import DialogueRewards, Mode, Penalty
from torchrl_lang.evaluation import GameRecords, Summary, summarize
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.visual_dialogue import PRESETS, VisualDialogueData, VisualDialoguePlay
from torchrl_lang.schema import TERMINATED
from torchrl_lang.text import Tokenizer

_DEFINITIONS: tuple[Penalty, ...] = ("soft", "hard", "conservative")
"""Of yes-or-no answers, whose shares an evaluation shows."""


@checked
@dataclass(frozen=True)
class VisualDialogueTask(Task):
    """Questions about an image, whose answers bring a guesser nearer to it (ILQL, arXiv 2206.11871, section 6.3).

    A dialogue is won in mode "env_stops" if the percentile was reached before the tenth round, in the other modes if
    its questions increased the percentile, or decreased the distance.

    Dialogues, features and models are read once in a process and shared by its environments. The tokenizer, and with it
    ``row_length`` and ``action_length``, are those of the folder: every dialogue of the files fits.

    Args:
        folder: that ``prepare visual_dialogue`` filled.
        mode, penalty, penalty_value, scale, shift: of :class:`~torchrl_lang.envs.visual_dialogue.DialogueRewards`.
        measure, image: of :class:`~torchrl_lang.envs.visual_dialogue.VisualDialogueEnv`.
        server: address of a server of the models, to be used instead of those of the folder.

    Raises:
        ValueError: an option is unknown or does not fit the others.
        FileNotFoundError: later, when it is read, the folder has not been prepared.
    """

    name: ClassVar[str] = "visual_dialogue"
    data_options = VisualDialogueData
    play_options = VisualDialoguePlay
    presets = PRESETS
    baselines = ("random", "data")
    turns_name = "questions"
    metric_meanings: ClassVar[Mapping[str, str]] = {
        "rounds": "mean number of answered questions",
        "percentile": "mean percentile of the true image after the last round",
        "distance": "mean distance to the true image's features after the last round",
        **{f"yes_no_{kind}": f"share of yes-or-no answers by the {kind} definition" for kind in _DEFINITIONS},
    }
    splits = ("test", "val", "train")
    evaluated: ClassVar[Mapping[str, Any]] = {"split": "val", "order": "cycle"}
    kept_entries = (PROGRESS,)

    folder: str
    mode: Mode = "env_stops"
    penalty: Penalty = "none"
    penalty_value: float = -2.0
    scale: float = 1.0
    shift: float = 0.0
    measure: Measure = "rank"
    image: bool = True
    server: str | None = None

    def __post_init__(self) -> None:
        if self.rewards.ends_by_percentile and self.measure == "distance":
            raise ValueError("Mode 'env_stops' needs measure='rank': its end is a percentile.")

    @property
    def rewards(self) -> DialogueRewards:
        """Ends and rewards of dialogues."""
        names = ("mode", "penalty", "penalty_value", "scale", "shift")
        return DialogueRewards(**{name: getattr(self, name) for name in names})

    @property
    def prepared(self) -> PreparedFolder:
        """The folder."""
        return PreparedFolder(self.folder)

    @property
    def action_length(self) -> int:
        """See :meth:`Task.action_length`."""
        return self.prepared.tokens().action_length

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer."""
        return self.prepared.tokens().tokenizer

    def data(self, split: str) -> VisualDialogues:
        """The dialogues of a split."""
        return self.prepared.data(split, self.measure)

    def models(self) -> DialogueModels:
        """The models that answer and guess."""
        return self.prepared.models() if self.server is None else _remote(self.server)

    def env(self, batch_size: int, *, split: str = "train", **options: Any) -> VisualDialogueEnv:
        """The environment on the dialogues of a split."""
        tokens = self.prepared.tokens()
        fixed: dict[str, Any] = {"rewards": self.rewards, "measure": self.measure, "image": self.image}
        more = fixed | {"row_length": tokens.row_length, "action_length": tokens.action_length, **options}
        return VisualDialogueEnv(self.data(split), self.models(), tokens.tokenizer, batch_size=[batch_size], **more)

    def features(self) -> tuple[int, int] | None:
        """See :meth:`Task.features`; it reads the validation split, which evaluations play."""
        return (1, self.data("val").features.feature_size) if self.image else None

    def maker(self, options: VisualDialogueData) -> EpisodeSampler:
        """The files' dialogues, or games of the player; the same command continues an interrupted one."""
        if options.player == "none":
            tokens, data = self.prepared.tokens(), self.data("train")
            return SceneRows(data, tokens.tokenizer, tokens.row_length, rewards=self.rewards, image=self.image)
        return PolicySampler(self.env(min(options.batch, options.games)), self.player(options.player).policy)

    def number_of_episodes(self, options: VisualDialogueData) -> int:
        """Number of dialogues."""
        return len(self.data("train")) if options.player == "none" else options.games

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"data"``: a random question of the training dialogues that it has not asked; ``"random"``: any of them."""
        choice: Any = {"repeat": named_player(name, {"random": True, "data": False}), "seed": seed}
        questions = [each.question for dialogue in self.data("train").dialogues for each in dialogue.rounds]
        tokens = self.prepared.tokens()
        return Player(QuestionPlayer(questions, tokens.tokenizer, tokens.action_length, **choice))

    def won(self, records: GameRecords) -> Tensor:
        """Dialogues that count as won, bool ``[N]``."""
        if self.mode == "env_stops":
            return records.terminated & (records.turns < ROUNDS)
        gain = records.kept[PROGRESS][:, 1:].sum(-1)
        return gain > 0 if self.measure == "rank" else gain < 0

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of dialogues: rounds, the final percentile or distance, shares of yes-or-no answers by definition."""
        rounds = played_rounds(records.rows.copy().set(TERMINATED, records.terminated[:, None]), self.tokenizer())
        final = {"rank": "percentile", "distance": "distance"}[self.measure]
        metrics: dict[str, Any] = {
            "rounds": lambda records: torch.tensor([float(len(each)) for each in rounds]),
            final: lambda records: records.kept[PROGRESS].double().cumsum(-1)[:, -1].float(),
        }
        for kind in _DEFINITIONS:
            metrics[f"yes_no_{kind}"] = lambda records, kind=kind: yes_no_rate(rounds, kind)
        return summarize(records, name=name, won=self.won, metrics=metrics)

    def number_of_games(self, split: str | None) -> int:
        """Number of dialogues of a split."""
        return len(self.data(split or self.splits[0]))


@lru_cache(maxsize=4)
def _remote(url: str) -> RemoteModels:
    """One client for all environments, which reuses its connections."""
    return RemoteModels(url)
