"""Players of trained runs: the decoding is chosen on validation parents, and replies once to test parents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.envs.reddit.task import RedditTask
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.compare import CHOICE, METHODS, REPORT, TrainedPlayer, decodings
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.reddit_demo.limits import Limits
from torchrl_lang.recipes.reddit_demo.written import Figures, WrittenComments, read_figures

__all__ = ["CommentPlayer", "Scorer"]

_TEMPERATURES = (0.2, 0.5, 0.8, 1.0)
_BETAS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Close to each other: from one to the next, comments become less profane and less varied."""
_MIN_P = 0.05
"""Of tokens by values: an end in the middle of a sentence avoids all harm, and no data show that it is bad."""


@dataclass(frozen=True)
class Scorer:
    """Measures the comments of one training seed: the task with the reward without noise, and BC's run.

    Args:
        task: the task.
        bc: folder of BC's run.
        seed: of training.
        choice_comments: comments on validation parents for each decoding.
        comments: on test parents.
    """

    task: RedditTask
    bc: Path
    seed: int
    choice_comments: int
    comments: int

    @cached_property
    def actor(self) -> TensorDictModuleBase:
        """The language model of BC's run."""
        return saved_actor(load_run(self.bc).model)

    @cached_property
    def limits(self) -> Limits:
        """What decodings are compared with."""
        data = WrittenComments.of_data(self.task, self.actor, split=CHOICE[0], games=self.choice_comments)
        return Limits(data.figures)

    def data(self) -> WrittenComments:
        """As many comments of the data as each player writes."""
        return WrittenComments.of_data(self.task, self.actor, split=REPORT[0], games=self.comments)

    def ask(self, policy: TensorDictModuleBase, *, report: bool) -> WrittenComments:
        """Comments of a policy: for the report, or for the choice of its decoding."""
        (split, first), games = (REPORT, self.comments) if report else (CHOICE, self.choice_comments)
        seed = first + self.seed
        return WrittenComments.by_player(self.task, policy, self.actor, split=split, games=games, seed=seed)


@dataclass(frozen=True)
class CommentPlayer(TrainedPlayer[WrittenComments]):
    """A finished run and its comments on test parents.

    Args:
        folder, method: as in :class:`TrainedPlayer`.
        scorer: of its seed.
    """

    remedy = "delete it: the validation comments are written again"

    scorer: Scorer

    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; values both greedily and sampled."""
        by_values = METHODS[self.method].by_values
        ways: dict[str, Any] = {
            "temperatures": _TEMPERATURES,
            "guided_temperatures": (1.0,),
            "betas": _BETAS,
            "min_p": _MIN_P,
        }
        return decodings(self.finished, by_values=by_values, **ways)

    def measure(self, policy: TensorDictModuleBase) -> dict[str, Any]:
        """The figures of comments on validation parents."""
        return asdict(self.scorer.ask(policy, report=False).figures)

    def play(self, policy: TensorDictModuleBase) -> WrittenComments:
        """The comments on test parents."""
        return self.scorer.ask(policy, report=True)

    def load(self, path: Path) -> WrittenComments:
        """Read comments."""
        return WrittenComments.load(path)

    def announce(self, decoding: str, games: WrittenComments) -> None:
        """Print how many comments were written."""
        print(f"{self.folder.name}, {decoding}: {len(games.texts)} comments on test parents", flush=True)

    @cached_property
    def choice(self) -> Mapping[str, Figures]:
        """The figures of each decoding on validation parents."""
        return {name: read_figures(each) for name, each in self.measured.items()}

    @property
    def best(self) -> str:
        """The decoding that is reported."""
        return self.scorer.limits.choose(self.choice)

    @property
    def keeps_limits(self) -> bool:
        """Whether that decoding keeps the limits."""
        return self.scorer.limits.excess(self.choice[self.best]) <= 1
