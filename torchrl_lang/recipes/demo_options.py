"""The options of the demos, and the offline methods that they compare. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchrl_lang.recipes.algorithms.finished import BETAS
from torchrl_lang.recipes.algorithms.training import DeviceOptions
from torchrl_lang.recipes.options import Options, near, option, required, with_defaults
from torchrl_lang.recipes.tasks.reddit import CorpusOptions
from torchrl_lang.recipes.tasks.visual_dialogue import PRESETS


class OfflineMethod(NamedTuple):
    """How a method is named in tables and trained.

    Examples:
        >>> from torchrl_lang.recipes.demo_options import METHODS
        >>> METHODS["best-30"].title, METHODS["best-30"].train
        ('BC best 30 %', ('bc', '--fraction', '0.3'))
    """

    title: str
    train: tuple[str, ...]
    """Arguments of ``train``."""
    start: str | None = None
    """The method whose run it starts from."""
    by_values: bool = True
    """Whether values decode if it has some; otherwise they train the policy only."""


METHODS: Mapping[str, OfflineMethod] = {
    "bc": OfflineMethod("BC", ("bc",)),
    "best-30": OfflineMethod("BC best 30 %", ("bc", "--fraction", "0.3")),
    "best-20": OfflineMethod("BC best 20 %", ("bc", "--fraction", "0.2")),
    "best-10": OfflineMethod("BC best 10 %", ("bc", "--fraction", "0.1")),
    "dt": OfflineMethod("DT", ("dt",)),
    "dt-to-go": OfflineMethod("DT, return to go", ("dt", "--mode", "decremented")),
    "monte-carlo": OfflineMethod("Monte-Carlo returns", ("monte-carlo",)),
    "single-step": OfflineMethod("single-step", ("single-step",)),
    "awac": OfflineMethod("AWAC", ("awac",), by_values=False),
    "cql": OfflineMethod("CQL", ("cql",)),
    "bcq": OfflineMethod("BCQ", ("bcq",)),
    "psi": OfflineMethod("psi", ("psi",)),
    "qsft": OfflineMethod("Q-SFT", ("qsft",), start="bc"),
    "oreo": OfflineMethod("OREO", ("oreo",), start="bc"),
    "dpo": OfflineMethod("DPO", ("dpo",), start="bc"),
    "ipo": OfflineMethod("IPO", ("ipo",), start="bc"),
    "kto": OfflineMethod("KTO", ("kto",), start="bc"),
    "chai": OfflineMethod("CHAI", ("chai",), start="bc"),
    "utterance-ilql": OfflineMethod("ILQL, utterances", ("utterance-ilql",)),
    "ilql": OfflineMethod("ILQL", ("ilql",)),
}
"""The methods by the names that commands take."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(Options):
    """Base of the options of comparisons.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.demo_options import ComparisonOptions
        >>> options = ComparisonOptions(out=Path("runs/comparison"), steps=100, width=64)
        >>> options.of_training(seed=1)
        {'steps': 100, 'seed': 1, 'width': 64}
    """

    out: Path = required("folder of all results; the same command continues")
    folder: Path | None = option(None, "folder of the data; none: they are made in --out")
    methods: tuple[str, ...] = option(("bc", "best-30", "best-10", "ilql"), f"methods among {', '.join(METHODS)}")
    seeds: int = option(1, "training seeds, from 0 on", ge=1)
    steps: int = option(3000, "training steps of each run", ge=1)
    layers: int | None = option(None, "transformer blocks; none: the task's preset", ge=1)
    width: int | None = option(None, "hidden size; none: the task's preset", ge=1)
    batch_size: int | None = option(None, "episodes in a batch; none: the task's preset", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"--methods has no {name}{near(name, METHODS)} The methods are {', '.join(METHODS)}.")

    def record(self, *free: str) -> None:
        """Record the options, or check that results of earlier calls in the folder go together with them.

        Args:
            *free: further options that may differ between calls, beside the folder, the methods and the seeds.

        Raises:
            ValueError: another option differs.
        """
        from torchrl_lang.recipes.records import keep_record

        fixed = replace(self, folder=self.folder and self.folder.resolve())
        keep_record(self.out, fixed, free=("out", "methods", "seeds", *free))

    def of_training(self, seed: int) -> dict[str, Any]:
        """The options of ``train`` that all runs of a seed share."""
        sizes = {"layers": self.layers, "width": self.width, "batch-size": self.batch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        return {"steps": self.steps, "seed": seed, **given}


@dataclass(frozen=True, kw_only=True)
class Demo(Options):
    """Offline RL beside every way of imitating its data, on a graph and in Wordle: about ten minutes, two cores."""

    out: Path = option(Path("runs/demo"), "folder of all results")
    parts: tuple[Literal["graph", "wordle"], ...] = option(("graph", "wordle"), "which parts to run")
    walks: int = option(4000, "random walks in the graph's dataset", ge=20)
    graph_steps: int = option(700, "training steps of each run on the graph", ge=1)
    words: int = option(50, "how many of the shipped words", ge=1, le=2250)
    games: int = option(40_000, "games in Wordle's dataset", ge=20)
    wordle_steps: int = option(3000, "training steps of each run on Wordle", ge=1)
    eval_games: int = option(1000, "games for each row of a table", ge=2)
    betas: tuple[float, ...] = option(BETAS, "weights of ILQL's values in the tables", gt=0)
    seed: int = option(0, "seed of everything", ge=0)


@dataclass(frozen=True, kw_only=True)
class TextWorldDemo(Options):
    """TextWorld: experts' games, BC, PPO, and a table on games with other solutions, in half an hour."""

    out: Path = option(Path("runs/textworld"), "folder of all results")
    kinds: tuple[Literal["coin_collector", "simple"], ...] = option(
        ("coin_collector", "simple"), "the engine's kinds of game"
    )
    quick: bool = option(False, "five minutes: the coin collector alone, with fewer games and steps")
    seed: int = option(0, "seed of weights, games and sampling", ge=0)


@with_defaults(
    out=Path("runs/reddit"), steps=3000, pairs=40_000, sentences=4, rude_when_calm=0.7, rude_when_provoked=0.9
)
class RedditDemo(ComparisonOptions, CorpusOptions):
    """Reddit comments: BC on all and on the best, and ILQL with and without noise, in a quarter of an hour.

    The generated comments have several sentences, most of them rude, so that few comments are polite throughout. A copy
    of the best tenth then copies rude ones, too; values of tokens choose each sentence by itself.
    """

    tokenizer: str = option("words", "words: those of the training texts; or name or folder of a Hugging Face one")
    comments: int = option(1000, "comments on test parents of each player, at most the test comments", ge=2)
    choice_comments: int = option(
        1000, "comments on validation parents for each decoding, at most all; distinct-2 depends on their number", ge=2
    )


@with_defaults(out=Path("runs/visual_dialogue"), steps=PRESETS["bc"]["steps"])
class VisualDialogueDemo(ComparisonOptions):
    """Visual dialogue: BC and ILQL under three rewards, a table on test scenes for each, in half an hour."""

    folder: Path | None = option(None, "folder that `prepare visual_dialogue` filled; none: prepare one in --out")
    rewards: tuple[Literal["none", "soft", "hard", "conservative"], ...] = option(
        ("none", "hard", "conservative"), "rewards to train and to evaluate on"
    )
    eval_every: int | None = option(
        None, "steps between checkpoints, the best of which plays; none: one after the last step", ge=1
    )
    eval_games: int = option(1000, "test scenes that each player plays once, at most all", ge=2)
    choice_games: int = option(250, "validation scenes on which decodings are chosen, at most all", ge=1)
    image: bool = option(True, "the agent sees the image")


@dataclass(frozen=True, kw_only=True)
class ChatDemo(DeviceOptions):
    """A pretrained chat model plays: zero-shot, after BC and ILQL on dialogues, after PPO.

    Ten to fifteen minutes on two cores. Its page shows the same dialogues side by side.
    """

    out: Path = option(Path("runs/chat"), "folder of all results; those of a task are in a folder of its name")
    task: Literal["guess", "shop"] = option("guess", "guess a number, or sell to a customer with a hidden limit")
    pretrained: str | None = option(
        None, "name, folder or GGUF file of a chat model; none: SmolLM2-135M-Instruct, from a package of PyPI"
    )
    games: int = option(1000, "dialogues of the scripted player to learn from", ge=20)
    bc_steps: int = option(64, "training steps of BC", ge=1)
    ilql_steps: int | None = option(None, "training steps of ILQL; none: 100 on guess, 50 on shop", ge=1)
    iterations: int = option(12, "training iterations of PPO", ge=2)
    ppo_games: int = option(64, "games played in parallel in an iteration", ge=1)
    top_layers: int = option(6, "transformer blocks that train, counted from the last", ge=1)
    eval_games: int = option(64, "games for each row of the table", ge=2)
    choice_games: int = option(32, "other games, on which the temperature of BC and ILQL's beta are chosen", ge=1)
    betas: tuple[float, ...] = option((6.0, 8.0, 12.0), "weights of ILQL's values to choose from", gt=0)
    seed: int = option(0, "seed of everything", ge=0)
