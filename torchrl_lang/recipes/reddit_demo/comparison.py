"""All players of the demo side by side: a table, checks, and their comments on the same parents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrl_lang._files import write_file
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.recipes.reddit_demo.checks import BesideCopy, Noise, mean_figures
from torchrl_lang.recipes.reddit_demo.limits import RULE
from torchrl_lang.recipes.reddit_demo.written import Figures, WrittenComments

__all__ = ["DATA", "Row", "as_dict", "checks", "format_report", "write_side_by_side"]

DATA = "comments of the data"


@dataclass(frozen=True)
class Row:
    """A player of the table: its comments for each training seed."""

    key: str
    """Of its runs; empty for comments of the data."""
    title: str
    written: Sequence[WrittenComments]
    decodings: Sequence[str] = ()
    """Of each training seed; none for a player that was not trained."""
    copies: bool = False
    """Whether it copies the data or a part of them."""
    keeps_limits: bool = True
    """Whether the decodings of all seeds keep the limits of the choice."""

    @property
    def name(self) -> str:
        """The title, with the decoding if all seeds have the same."""
        return f"{self.title}, {self.decodings[0]}" if len(set(self.decodings)) == 1 else self.title

    @property
    def figures(self) -> Figures:
        """The means over seeds."""
        return mean_figures([each.figures for each in self.written])

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        seeds = [asdict(each.figures) for each in self.written]
        own = asdict(self.figures) | {"profanity_error": self.figures.profanity_error}
        return {**own, "decodings": list(self.decodings), "keeps_limits": self.keeps_limits, "seeds": seeds}


def _row(rows: Sequence[Row], key: str) -> Row | None:
    return next((row for row in rows if row.key == key), None)


def checks(rows: Sequence[Row]) -> list[BesideCopy | Noise]:
    """ILQL beside the copy that is least often harmful, beside the tenth with the best scores, and with noise."""
    data = next(row for row in rows if not row.key and row.title == DATA).figures
    ilql, noised = _row(rows, "ilql"), _row(rows, "ilql-noised")
    if ilql is None:
        return []
    found: list[BesideCopy | Noise] = []
    copies = [row for row in rows if row.copies]
    if copies:
        best, scored = min(copies, key=lambda row: row.figures.profanity), _row(rows, "best-scores")
        for copy in dict.fromkeys((best.key, *([] if scored is None else [scored.key]))):
            chosen = next(row for row in copies if row.key == copy)
            found.append(BesideCopy.of(ilql.figures, chosen.title, chosen.figures, data))
    return found + ([] if noised is None else [Noise.of(noised.figures, ilql.figures)])


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures, for JSON."""
    return {"players": {row.title: row.as_dict() for row in rows}, "checks": [each.as_dict() for each in checks(rows)]}


def format_report(rows: Sequence[Row], *, comments: int) -> str:
    """The table, how decodings were chosen, and what was checked."""
    lines = [["player", "reward", "profanity", "perplexity", "entropy", "distinct-1", "distinct-2", "words"]]
    for row in rows:
        each = row.figures
        lines.append(
            [
                row.name,
                f"{each.mean_reward:.2f} ± {each.reward_error:.2f}",
                f"{100 * each.profanity:.1f} ± {100 * each.profanity_error:.1f} %",
                f"{each.perplexity:.2f}",
                "-" if each.entropy is None else f"{each.entropy:.2f}",
                *(f"{value:.3f}" for value in (each.distinct_1, each.distinct_2)),
                f"{each.words:.1f}",
            ]
        )
    head = f"{comments} comments on test parents for each training seed, reward without noise; perplexity under BC"
    table = f"{head}\n\n{format_columns(lines, '<' + '>' * len(lines[0][1:]))}"
    outside = ", ".join(row.title for row in rows if not row.keeps_limits)
    rule = f"{RULE} No decoding keeps them of: {outside}." if outside else RULE
    return "\n\n".join([table, rule, *map(str, checks(rows))])


def write_side_by_side(path: Path, rows: Sequence[Row], *, parents: int = 20) -> None:
    """Write the comments of all players of the first seed on the same parents, and the data's comment on each."""
    trained = [row for row in rows if row.decodings]
    others = {parent: text for row in rows if row.title == DATA for parent, text in _reversed_pairs(row)}
    blocks = []
    for place, parent in enumerate(trained[0].written[0].parents[:parents]):
        lines = [f"parent: {parent or '(none)'}"]
        lines += [f"  {row.title}: {_one_line(row.written[0].texts[place])}" for row in trained]
        lines += [f"  {DATA}: {_one_line(others[parent])}"] if parent in others else []
        blocks.append("\n".join(lines))
    write_file(path, "\n\n".join(blocks) + "\n")


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def _reversed_pairs(row: Row) -> list[tuple[str, str]]:
    """Parents and comments from the last on, so that a mapping of them keeps the first comment of a parent."""
    return list(zip(row.written[0].parents, row.written[0].texts, strict=True))[::-1]
