"""Outcomes of a campaign, and the table that sums them up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.campaigns.isolation import Died, run_forked
from torchrl_lang.evaluation.tables import format_columns

GOOD = ("refused", "harmless", "accepted", "recovered")
"""Verdicts that an attack may end with; any other is a failure."""


@dataclass(frozen=True)
class Outcome:
    """How one attack ended."""

    group: str
    """The row of the table that it is counted in."""
    attack: str
    verdict: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict not in GOOD


def table(outcomes: list[Outcome]) -> str:
    """Counts of each verdict by group, then every failure."""
    verdicts = sorted({outcome.verdict for outcome in outcomes}, key=lambda name: (name not in GOOD, name))
    counts = Counter((outcome.group, outcome.verdict) for outcome in outcomes)
    groups = [*sorted({outcome.group for outcome in outcomes}), "all"]
    for outcome in outcomes:
        counts["all", outcome.verdict] += 1
    rows = [["", *verdicts, "sum"]]
    for group in groups:
        numbers = [counts[group, verdict] for verdict in verdicts]
        rows.append([group, *map(str, numbers), str(sum(numbers))])
    lines = [format_columns(rows, "<" + ">" * len(rows[0][1:]))]
    failures = [outcome for outcome in outcomes if outcome.failed]
    lines += ["", f"{len(failures)} of {len(outcomes)} attacks failed the library."]
    for outcome in failures:
        lines += ["", f"{outcome.verdict}: {outcome.attack}", *(f"    {line}" for line in outcome.detail.splitlines())]
    return "\n".join(lines)


def outcomes(attacks: dict[str, Callable[[], list[list[str]]]], *, timeout: float) -> Iterator[Outcome]:
    """What attacks found, by their names: each returns ``[group, verdict, detail]`` of everything that it tried."""
    for name, result in zip(attacks, run_forked([*attacks.values()], timeout=timeout), strict=True):
        found = [["?", result.verdict, result.detail]] if isinstance(result, Died) else result
        yield from (Outcome(group, f"{name} {group}", verdict, detail) for group, verdict, detail in found)
