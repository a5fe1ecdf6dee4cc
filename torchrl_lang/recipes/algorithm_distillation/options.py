"""Options of algorithm distillation; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torchrl_lang.recipes.algorithms.offline import SizeOptions
from torchrl_lang.recipes.algorithms.training import LoopOptions
from torchrl_lang.recipes.options import Options, option, required, with_defaults

FamilyName = Literal["dark_room", "dark_key_door", "bandit"]
StartName = Literal["centre", "random"]
SourceName = Literal["posterior", "noise", "q_learning", "ucb", "expert"]
FormatName = Literal["rl", "language"]
TemplateName = Literal["compact", "spelled", "sparse"]

OF_RL_LOSS = ("label_smoothing", "reward_weight", "observation_weight")
LAST_EPISODES = 3
"""Number of the last episodes whose mean return chooses the checkpoint."""
_QUICK: Mapping[str, Any] = {"size": 7, "episodes": 30, "seeds": 3}


class _FamilyDefaults(NamedTuple):
    """Defaults of a family."""

    episode_length: int
    """A bandit's episodes are short, as their ends mean nothing to it."""
    source: SourceName
    streams: int
    """Histories of each task at a time: of keys and doors, which have many tasks, one."""
    start: StartName
    """Where episodes begin in the papers' rooms; a bandit has no place."""


FAMILIES: dict[FamilyName, _FamilyDefaults] = {
    "dark_room": _FamilyDefaults(20, "posterior", 100, "centre"),
    "dark_key_door": _FamilyDefaults(50, "posterior", 1, "random"),
    "bandit": _FamilyDefaults(10, "ucb", 100, "centre"),
}


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(Options):
    """Options that define the tasks."""

    env: FamilyName = option("dark_room", "family of tasks")
    size: int = option(7, "rows and columns of a room", ge=2, le=64)
    start: StartName | None = option(
        None, "where an episode in a room begins; none: in the centre (dark_key_door: anywhere, random)"
    )
    arms: int = option(10, "arms of a bandit", ge=2)
    episode_length: int | None = option(None, "steps of an episode; none: 20 (dark_key_door: 50, bandit: 10)", ge=1)
    tasks: int | None = option(
        None, "number of tasks, drawn at random; none: all of dark_room, 1,000 of the others", ge=3
    )
    validation: float = option(0.1, "share of the tasks on which checkpoints are chosen", gt=0, lt=1)
    test: float = option(0.15, "share of the tasks that are reported", gt=0, lt=1)
    split_seed: int = option(0, "seed of the tasks and of their split", ge=0)

    def start_name(self) -> StartName:
        """Where an episode begins."""
        return FAMILIES[self.env].start if self.start is None else self.start


@dataclass(frozen=True, kw_only=True)
class HistoryOptions(FamilyOptions):
    """Options of the histories."""

    source: SourceName | None = option(None, "algorithm that makes the histories; none: posterior (bandit: ucb)")
    history_episodes: int | None = option(None, "episodes of a history; none: 12 (q_learning: 600, ucb: 20)", ge=1)
    skip_episodes: int | None = option(None, "keep every k-th episode of a history; none: 1 (q_learning: 40)", ge=1)
    streams: int | None = option(None, "histories of each task at a time; none: 100 (dark_key_door: 1)", ge=1)
    fresh_every: int = option(50, "training steps until the histories are replaced by new ones", ge=1)
    history: Path | None = option(None, "folder of a recorded history of these tasks, instead of new ones")
    symmetries: bool = option(
        False, "mirror and turn the histories of a room: eight times as many places, with the same games"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetries and self.env == "bandit":
            raise ValueError("symmetries are those of a room, and env=bandit has none: leave --symmetries out.")
        if self.symmetries and self.start_name() == "centre" and self.size % 2 == 0:
            raise ValueError(f"A room of an even size={self.size} has no centre to mirror at: give --start random.")

    def source_name(self) -> SourceName:
        """The source algorithm."""
        return FAMILIES[self.env].source if self.source is None else self.source


@dataclass(frozen=True, kw_only=True)
class FormatOptions(SizeOptions, HistoryOptions, group="run"):
    """Options of a format and of its model.

    Raises:
        ValueError: a template is given with the RL format.
    """

    of_language: ClassVar[Mapping[str, Any]] = {"context_episodes": 3}
    """Other defaults of the language format, for the command line. A step is several tokens, and attention to twice as
    many episodes would make a training step three times as slow."""

    format: FormatName = option(
        "rl", "rl: a token for each step and heads for its numbers; language: text and a causal language model"
    )
    template: TemplateName | None = option(None, "how the language format writes a step; none: compact")
    context_episodes: int = option(6, "episodes that a model reads", ge=1)
    temperature: float = option(1.0, "of the actions in an evaluation", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "rl" and self.template is not None:
            raise ValueError(f"template={self.template} is for text: give --format language, or no template.")

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """See :meth:`Options.from_given`; with the language format its defaults where no values are given."""
        return super().from_given({**(cls.of_language if given.get("format") == "language" else {}), **given})


@with_defaults(lr=2e-3, optimizer="adamw", warmup=20, final_lr=0.02, eval_every=400, steps=400, weight_decay=0.05)
class AD(LoopOptions, FormatOptions, algorithm="ad"):
    """Algorithm distillation on tasks with a hidden parameter; new histories are drawn while it trains.

    The command line has other defaults with ``--format language``: 1,000 steps of 32 windows of 3 episodes, and Muon.
    """

    of_language = {**FormatOptions.of_language, "batch_size": 32, "lr": 3e-3, "optimizer": "muon", "steps": 1000}

    batch_size: int = option(64, "windows in a batch", ge=1)
    label_smoothing: float = option(0.0, "share of an action's target that is uniform", ge=0, lt=1)
    reward_weight: float = option(0.0, "weight of the loss of predicted rewards", ge=0)
    observation_weight: float = option(0.0, "weight of the loss of predicted observations", ge=0)
    episodes: int = option(20, "episodes of an evaluation on validation tasks", ge=LAST_EPISODES)
    eval_streams: int = option(16, "times that each task is played side by side in an evaluation", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "language" and (given := [name for name in OF_RL_LOSS if getattr(self, name)]):
            raise ValueError(f"{' and '.join(given)} are for the RL format's loss: leave them out.")


@with_defaults(size=9)
class Distill(FormatOptions):
    """Algorithm distillation beside expert distillation, its source, random and optimal actions, on unseen tasks."""

    out: Path = option(Path("runs/distill"), "folder of all results; the same command continues")
    quick: bool = option(
        False, "a room of 7 x 7, 30 episodes, 3 seeds and 400 steps (of language 1,000), unless they are given"
    )
    methods: tuple[Literal["ad", "ed"], ...] = option(("ad", "ed"), "ad: algorithm distillation; ed: of an expert")
    seeds: int = option(5, "training seeds, from 0 on", ge=1)
    steps: int = option(2000, "training steps of each run", ge=1)
    episodes: int = option(40, "episodes of each stream on test tasks, without a change of weights", ge=6)
    test_streams: int = option(16, "streams of each test task", ge=1)

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """See :meth:`Options.from_given`; with ``quick`` its values where none are given."""
        if not given.get("quick"):
            return super().from_given(given)
        steps = 1000 if given.get("format") == "language" else 400
        return super().from_given({**_QUICK, "steps": steps, **given})


@dataclass(frozen=True, kw_only=True)
class TextHistoryOptions(Options):
    """Options of the histories."""

    runs: tuple[Path, ...] = required("folders of --record-history, each with the histories of one or more runs")
    logs: bool = option(False, "the folders hold logs of Algorithm-Distillation-RLHF instead")
    block: Literal["turn", "episode"] = option(
        "turn",
        "turn: a block is what the environment wrote, the response and the reward of the turn; episode: the dialogue "
        "up to the last response, that response and the return",
    )
    reward: Literal["levels", "bins", "decimals"] = option(
        "levels", "levels: a word for each different reward; bins: one for each of --bins ranges; decimals: in digits"
    )
    bins: int = option(10, "number of ranges that rewards are sorted into with --reward bins", ge=2)
    validation: float = option(0.1, "share of each epoch's episodes that choose the checkpoint", gt=0, lt=1)
    test: float = option(0.1, "share of each epoch's episodes that are reported", gt=0, lt=1)
    test_runs: tuple[str, ...] = option((), "names of runs that are reported instead, of which no episode is learned")
    split_seed: int = option(0, "seed of which episodes of an epoch these are", ge=0)
    row_length: int = option(512, "tokens of a row: the context", ge=2)
    loss_on: Literal["actions", "all"] = option("all", "learn from all tokens, or from the completions alone")
    symbols: tuple[str, ...] = option((), "texts that are one token each, such as the colours of Wordle")
    min_count: int = option(5, "words that are rarer in the histories are spelled", ge=1)
    pretrained: str | None = option(
        None, "name or folder of a pretrained Hugging Face model with its tokenizer; none: from scratch"
    )


@with_defaults(eval_every=100, steps=400, weight_decay=0.05)
class TextAD(TextHistoryOptions, SizeOptions, LoopOptions):
    """Algorithm distillation of text tasks: a language model of recorded runs, and its accuracy of rewards."""

    batch_size: int = option(16, "rows in a batch", ge=1)
