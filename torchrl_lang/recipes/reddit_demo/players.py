"""Players of trained runs: the decoding is chosen on validation parents, and replies once to test parents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules.saved_readers import saved_actor
from torchrl_lang.recipes.load_run import FinishedRun, load_run
from torchrl_lang.recipes.offline_methods import METHODS, decodings
from torchrl_lang.recipes.reddit_demo.limits import Limits
from torchrl_lang.recipes.reddit_demo.written import Figures, WrittenComments, read_figures
from torchrl_lang.recipes.tasks.reddit import RedditTask
from torchrl_lang.storage import read_json, write_json

__all__ = ["CHOICE", "REPORT", "Scorer", "TrainedPlayer"]

CHOICE, REPORT = ("val", 1_000_000), ("test", 2_000_000)
"""Split on which the decoding is chosen, and the one that is reported, each with the seed of parents and sampling."""

_TEMPERATURES = (0.2, 0.5, 0.8, 1.0)


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
class TrainedPlayer:
    """A finished run, what was measured with it, and its comments; all are kept in the run's folder.

    Args:
        folder: of the run.
        method: its name in :data:`METHODS`.
        scorer: of its seed.
    """

    folder: Path
    method: str
    scorer: Scorer
    _written: dict[str, WrittenComments] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def finished(self) -> FinishedRun:
        """The run, opened when it is first needed."""
        return load_run(self.folder)

    @cached_property
    def policies(self) -> Mapping[str, TensorDictModuleBase]:
        """All ways to decode it, by name; both sampled and greedy."""
        by_values = METHODS[self.method].by_values
        ways = decodings(self.finished, by_values=by_values, guided_sampling=True, temperatures=_TEMPERATURES)
        return dict(ways)

    @cached_property
    def choice(self) -> Mapping[str, Figures]:
        """The figures of each decoding on validation parents."""
        path, remedy = self.folder / "choice.json", "delete it: the validation comments are written again"
        if not path.exists():
            found = {name: self.scorer.ask(policy, report=False).figures for name, policy in self.policies.items()}
            write_json(path, {name: asdict(each) for name, each in found.items()})
        return {name: read_figures(each) for name, each in read_json(path, remedy=remedy).items()}

    @property
    def best(self) -> str:
        """The decoding that is reported."""
        return self.scorer.limits.choose(self.choice)

    @property
    def keeps_limits(self) -> bool:
        """Whether that decoding keeps the limits."""
        return self.scorer.limits.excess(self.choice[self.best]) <= 1

    def test(self) -> WrittenComments:
        """The comments on test parents, by the best decoding."""
        best = self.best
        if best not in self._written:
            path = self.folder / "test" / f"{best.replace(',', '').replace(' ', '_')}.json"
            if not path.exists():
                written = self.scorer.ask(self.policies[best], report=True)
                written.save(path)
                print(f"{self.folder.name}, {best}: {len(written.texts)} comments on test parents", flush=True)
            self._written[best] = WrittenComments.load(path)
        return self._written[best]
