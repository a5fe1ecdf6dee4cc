"""Players of trained runs: decodings are chosen on validation games, those of the report are played once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tensordict.nn import TensorDictModuleBase

from torchrl_lang._files import read_json, write_json
from torchrl_lang.recipes.load_run import FinishedRun, load_run

__all__ = ["CHOICE", "REPORT", "Played", "TrainedPlayer"]

CHOICE, REPORT = ("val", 1_000_000), ("test", 2_000_000)
"""Split on which a decoding is chosen, and the one that is reported, each with the seed of games and sampling there."""


class Played(Protocol):
    """Games of a player that can be written to a file.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.comparison import Played
        >>> class Moves(list):
        ...     def save(self, path: Path) -> None:
        ...         path.write_text(" ".join(self))
        >>> games: Played = Moves(["left", "right"])
    """

    def save(self, path: Path) -> None:
        """Write them, atomically."""


Games = TypeVar("Games", bound=Played)


@dataclass(frozen=True)
class TrainedPlayer(ABC, Generic[Games]):
    """A finished run, what was measured with it, and its games; all are kept in the run's folder.

    Args:
        folder: of the run.
        method: its name in :data:`~torchrl_lang.recipes.offline_methods.METHODS`.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.comparison import TrainedPlayer
        >>> class Words(str):
        ...     def save(self, path):
        ...         path.parent.mkdir()
        ...         path.write_text(self)
        >>> class Writer(TrainedPlayer[Words]):
        ...     remedy = "delete it: the words are generated again"
        ...
        ...     def ways(self):
        ...         yield from {"greedy, beta 1": "yes", "sampled at 1": "perhaps"}.items()
        ...
        ...     def measure(self, policy):
        ...         return len(policy)
        ...
        ...     def play(self, policy):
        ...         return Words(policy)
        ...
        ...     def load(self, path):
        ...         return Words(path.read_text())
        ...
        ...     def announce(self, decoding, games):
        ...         print(f"{self.folder.name}, {decoding}: {len(games)} letters")
        >>> with tempfile.TemporaryDirectory() as home:
        ...     writer = Writer(Path(home, "run"), "bc")
        ...     writer.measured, [writer.test("greedy, beta 1") for _ in range(2)]
        ...     [path.name for path in Path(home, "run", "test").iterdir()]
        run, greedy, beta 1: 3 letters
        ({'greedy, beta 1': 3, 'sampled at 1': 7}, ['yes', 'yes'])
        ['greedy_beta_1.json']
    """

    remedy: ClassVar[str]
    """What to do about a damaged file of figures."""

    folder: Path
    method: str
    _played: dict[str, Games] = field(default_factory=dict, init=False, repr=False, compare=False)

    @abstractmethod
    def ways(self) -> Iterator[tuple[str, TensorDictModuleBase]]:
        """All ways to decode the run, by name; each is built when it is asked for."""

    @abstractmethod
    def measure(self, policy: TensorDictModuleBase) -> Any:
        """Figures of a way to decode, on validation games, as JSON."""

    @abstractmethod
    def play(self, policy: TensorDictModuleBase) -> Games:
        """Games that are reported."""

    @abstractmethod
    def load(self, path: Path) -> Games:
        """Read what their ``save`` wrote."""

    @abstractmethod
    def announce(self, decoding: str, games: Games) -> None:
        """Print a line about games that were just played."""

    @cached_property
    def finished(self) -> FinishedRun:
        """The run, opened when it is first needed."""
        return load_run(self.folder)

    @cached_property
    def policies(self) -> Mapping[str, TensorDictModuleBase]:
        """All ways to decode the run, by name."""
        return dict(self.ways())

    @cached_property
    def measured(self) -> Mapping[str, Any]:
        """What :meth:`measure` found for each way to decode, measured once and read from the file."""
        path = self.folder / "choice.json"
        if not path.exists():
            write_json(path, {name: self.measure(policy) for name, policy in self.policies.items()})
        return read_json(path, remedy=self.remedy)

    def test(self, decoding: str) -> Games:
        """The games that are reported by one way to decode, played once and read from the file."""
        if decoding not in self._played:
            path = self.folder / "test" / f"{decoding.replace(',', '').replace(' ', '_')}.json"
            if not path.exists():
                games = self.play(self.policies[decoding])
                games.save(path)
                self.announce(decoding, games)
            self._played[decoding] = self.load(path)
        return self._played[decoding]
