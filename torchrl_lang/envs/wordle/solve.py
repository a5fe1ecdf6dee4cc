"""Find the decision tree with the fewest guesses for a list of words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrl_lang.envs.wordle import DecisionTree, guess_words, solve
from torchrl_lang.envs.wordle.task import WordleGames
from torchrl_lang.recipes.options import option

__all__ = ["SolveWordle", "main"]


@dataclass(frozen=True, kw_only=True)
class SolveWordle(WordleGames):
    """Find the least expected number of guesses in Wordle and the decision tree that needs it."""

    guesses: str | None = option(None, "valid guesses beside the words: `all` of the shipped ones, or a file")
    opener: str | None = option(None, "the first guess, instead of the best one")
    max_tries: int | None = option(
        None, "guesses of a game, after which a word is lost and counts as one guess more", at_least=1
    )
    out: Path | None = option(None, "file for the decision tree, as JSON")


def main(options: SolveWordle) -> None:
    """Solve, print the result and save the tree."""
    if options.out is not None and options.out.exists():
        raise FileExistsError(f"{options.out} exists: delete it, or give another --out.")
    tree = solve(
        options.task().words,
        guesses=guess_words() if options.guesses == "all" else options.guesses,
        rules=options.rules,
        opener=options.opener,
        max_tries=options.max_tries,
    )
    print(_report(tree))
    if options.out is not None:
        tree.save(options.out)
        print(f"wrote {options.out}")


def _report(tree: DecisionTree) -> str:
    lines = [
        f"{len(tree.words)} words: {tree.expected_guesses:.4f} guesses expected ({tree.total} in total), "
        f"first guess {tree.guesses[0]}"
    ]
    for guesses, words in tree.histogram.items():
        lost = tree.max_tries is not None and guesses > tree.max_tries
        lines.append(f"{'lost' if lost else guesses:>6} {words:6} {'word' if words == 1 else 'words'}")
    return "\n".join(lines)
