"""Options and presets of visual dialogue, and of the commands that prepare it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, Options, PlayOptions, option, required, with_defaults
from torchrl_lang.recipes.tasks import task_class

_MODEL: Mapping[str, Any] = {"layers": 2, "batch_size": 32, "steps": 1200, "eval_every": 600, "eval_games": 200}
PRESETS: dict[str, dict[str, Any]] = {
    "bc": {**_MODEL},
    # All rewards are negative, so questions without data, such as repeated ones, look good unless the CQL term is
    # strong. Whether a question is the last one is chance for the most part: returns over turns make Q less noisy.
    "ilql": {**_MODEL, "cql_weight": 0.1, "qvalue_lmbda": 0.5},
    # They learn from one token to the one before, across dozens of tokens: a slow target Q takes too many steps.
    **{name: {"tau": 0.2} for name in ("cql", "bcq", "psi")},
    "evaluate": {"beta": (0.0, 1.0, 2.0, 4.0, 8.0)},
}


@dataclass(frozen=True, kw_only=True)
class VisualDialogueGames(Options, group="data"):
    """Options that define the dialogues."""

    folder: Path = required("folder that `prepare visual_dialogue` filled")
    mode: Literal["env_stops", "agent_stops", "10_stop"] = option(
        "env_stops", "who ends a dialogue: a percentile that is reached, `<stop>`, or ten rounds"
    )
    penalty: Literal["none", "soft", "hard", "conservative"] = option(
        "none", "which replies count as yes-or-no answers, whose questions are penalized; for `--mode env_stops`"
    )
    penalty_value: float = option(-2.0, "added to the reward of a penalized question", ge=-1e6, le=1e6)
    scale: float = option(
        1.0, "factor of the rewards, but not of the files' dialogues with `--mode env_stops`", ge=-1e6, le=1e6
    )
    shift: float = option(0.0, "added to the rewards that --scale applies to", ge=-1e6, le=1e6)
    measure: Literal["rank", "distance"] = option(
        "rank", "what a round is to improve: the percentile of the true image (rank), or the guess's distance to it"
    )
    image: bool = option(True, "the agent sees the image")
    server: str | None = option(None, "address of a server of the models; none: the folder's models, in this process")

    def task(self) -> Any:
        """The task."""
        given = {field.name: getattr(self, field.name) for field in fields(VisualDialogueGames)}
        kind: Any = task_class("visual_dialogue")
        return kind(**given | {"folder": str(self.folder.resolve())})


@with_defaults(batch=256)
class VisualDialogueData(VisualDialogueGames, DataOptions):
    """Generate a dataset: the training dialogues with the chosen rewards, or games of a player."""

    player: Literal["none", "data", "random"] = option(
        "none",
        "none: all dialogues of the files, regardless of --games; otherwise the player that asks in --games games",
    )

    def notes(self) -> dict[str, Any]:
        """Settings of the games beside the task."""
        return {} if self.player == "none" else {"player": self.player, **super().notes()}


@dataclass(frozen=True, kw_only=True)
class VisualDialoguePlay(VisualDialogueGames, PlayOptions):
    """Ask about an image that you do not see, or watch a policy."""


@dataclass(frozen=True, kw_only=True)
class PrepareVisualDialogue(Options):
    """Prepare visual dialogue: dialogues, models that answer and guess the image, rewards, a tokenizer."""

    out: Path = required("folder to fill; the same command continues after an interruption")
    files: Path | None = option(
        None, "folder with files in the layout of the real dataset, for train, val and test; none: generate some"
    )
    train: int = option(10_000, "dialogues to generate for training", ge=1)
    val: int = option(500, "dialogues to generate for validation; true images are ranked among theirs", ge=2)
    test: int = option(1000, "dialogues to generate for the final evaluation", ge=1)
    feature_size: int = option(128, "numbers of a generated image feature", ge=64, le=1 << 20)
    yes_no: float = option(0.5, "share of yes-or-no questions to generate", ge=0, le=1)
    tokenizer: str | None = option(
        None, "name or folder of a Hugging Face tokenizer; none: the words of the training dialogues"
    )
    guesser_epochs: int = option(6, "passes of the image guesser over the training dialogues", ge=1)
    answerer_epochs: int = option(3, "passes of the answerer over the training dialogues", ge=1)
    width: int = option(128, "width of the states of guesser and answerer", ge=1)
    seed: int = option(0, "seed of the generated dialogues and of the models", ge=0)


@dataclass(frozen=True, kw_only=True)
class VisualDialogueRewards(Options):
    """Compute both reward caches of a split: initial values and the reward of every round."""

    dialogues: Path = required("JSON file of the dialogues")
    features: Path = required("file of the image features: HDF5, or .npy")
    split: Literal["train", "val", "test"] = required("the split")
    out: Path = required("folder for the caches; the same command continues after an interruption")
    server: str | None = option(None, "address of a server of the models")
    models: Path | None = option(
        None, "folder of trained models, instead of a server; they rank among the images of the split"
    )
    batch_size: int = option(16, "dialogues at a time", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.server is None) == (self.models is None):
            raise ValueError("Give either --server or --models.")


@dataclass(frozen=True, kw_only=True)
class ServeVisualDialogue(Options):
    """Serve an answerer and an image guesser, and possibly a questioner, over HTTP."""

    models: Path = required("folder of the trained models")
    features: Path = required("file of the image features: HDF5, or .npy")
    split: Literal["train", "val", "test"] = option("val", "split whose images a true image is ranked among")
    questioner: Path | None = option(None, "folder of a finished run that asks questions; none: no such route")
    host: str = option("127.0.0.1", "address to listen on; the default is reachable from this machine alone")
    port: int = option(5000, "port to listen on; 0: a free one", ge=0, le=65535)
    items: int = option(64, "dialogues that a batch may have", ge=1)
    queue: int = option(256, "requests that may wait for the models", ge=1)
