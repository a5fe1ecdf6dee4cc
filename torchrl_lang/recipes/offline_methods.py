"""Every offline method for a comparison: its name, how it is trained, and all ways to decode its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules import ReturnEmbedding
from torchrl_lang.recipes.demo.parallel import run_in_parallel
from torchrl_lang.recipes.load_run import BETAS, FinishedRun
from torchrl_lang.recipes.run_policy import methods_of

__all__ = ["METHODS", "OfflineMethod", "PlannedRun", "decodings", "planned_runs", "train_missing"]

_TEMPERATURES = (0.2, 0.5, 1.0)
_CANDIDATES = (4, 8, 16)


class OfflineMethod(NamedTuple):
    """How a method is named in tables and trained.

    Examples:
        >>> from torchrl_lang.recipes.offline_methods import METHODS
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
    "chai": OfflineMethod("CHAI", ("chai",), start="bc"),
    "utterance-ilql": OfflineMethod("ILQL, utterances", ("utterance-ilql",)),
    "ilql": OfflineMethod("ILQL", ("ilql",)),
}
"""The methods by the names that commands take."""


class PlannedRun(NamedTuple):
    """A run to train, unless it has finished."""

    method: str
    out: Path
    options: Mapping[str, Any]
    """Of ``train``, by name."""

    @property
    def finished(self) -> bool:
        """Whether its model is there."""
        return (self.out / "model").exists()

    def command(self) -> list[str]:
        """The arguments of the package's command line.

        Examples:
            >>> from pathlib import Path
            >>> from torchrl_lang.recipes.offline_methods import PlannedRun
            >>> " ".join(PlannedRun("best-10", Path("run"), {"data": "games", "steps": 9}).command())
            'train bc --fraction 0.1 --out run --data games --steps 9'
        """
        words = ["train", *METHODS[self.method].train, "--out", self.out]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        return [str(word) for word in words]


def planned_runs(methods: Sequence[str], out: Mapping[str, Path], options: Mapping[str, Any]) -> list[PlannedRun]:
    """The runs of some methods, and of those that they start from; methods with values first: they take longest.

    Args:
        methods: names in :data:`METHODS`.
        out: the folder of each method's run.
        options: of ``train`` for all of them.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.offline_methods import METHODS, planned_runs
        >>> [run.method for run in planned_runs(["chai"], {name: Path(name) for name in METHODS}, {"data": "games"})]
        ['chai', 'bc']
    """
    wanted = {*methods, *(start for name in methods if (start := METHODS[name].start))}
    runs = []
    for name in reversed([name for name in METHODS if name in wanted]):
        start = METHODS[name].start
        runs.append(PlannedRun(name, out[name], {**options, **({} if start is None else {"start": out[start]})}))
    return runs


def train_missing(runs: Sequence[PlannedRun]) -> None:
    """Train the runs that have not finished, as many at a time as there are cores; each after the one it starts from.

    Raises:
        ValueError: a training failed; its message has been printed.
    """
    missing = {str(run.out): run for run in runs if not run.finished}
    for later in (False, True):
        chosen = {name: run for name, run in missing.items() if (METHODS[run.method].start is not None) == later}
        if chosen:
            run_in_parallel({name: run.command() for name, run in chosen.items()})


def decodings(
    finished: FinishedRun,
    *,
    by_values: bool = True,
    temperatures: Sequence[float] = _TEMPERATURES,
    guided_temperatures: Sequence[float] = (),
    betas: Sequence[float] = BETAS,
    min_p: float | None = None,
) -> Iterator[tuple[str, TensorDictModuleBase]]:
    """All ways to decode a run: what the algorithm prescribes, with each strength, and imitation in each way.

    Args:
        finished: the run.
        by_values: whether its values decode, if it has some.
        temperatures: of sampling.
        guided_temperatures: of sampling by values, too: where varied utterances are wanted, the likeliest one is not
            enough.
        betas: weights of values that are added to the logits; other kinds of values have weights of their own.
        min_p: by values only write tokens with at least this probability under the language model, relative to the
            likeliest one's: the values of tokens that the data never have there are not learned.
    """
    if finished.has_values and by_values:
        limits: dict[str, Any] = {} if min_p is None else {"min_p": min_p}
        for beta in betas if finished.betas == BETAS else finished.betas:
            yield f"greedy, beta {beta:g}", finished.policy(beta, method="greedy", **limits)
            for temperature in guided_temperatures:
                policy = finished.policy(beta, seed=0, temperature=temperature, **limits)
                yield f"sampled at {temperature:g}, beta {beta:g}", policy
        return
    if "best_of" in methods_of(finished.model):
        for candidates in _CANDIDATES:
            yield f"best of {candidates}", finished.policy(method="best_of", seed=0, candidates=candidates)
        return
    returns = finished.model.heads.get("returns")
    targets = sorted({returns.target, returns.high}) if isinstance(returns, ReturnEmbedding) else [None]
    for target in targets:
        asked: dict[str, Any] = {} if target is None else {"target_return": target}
        about = "" if target is None else f", return {target:.2f}"
        yield f"greedy{about}", finished.policy(method="greedy", **asked)
        for temperature in temperatures:
            yield f"sampled at {temperature:g}{about}", finished.policy(seed=0, temperature=temperature, **asked)
