"""Run a campaign: ``python -m tests.campaigns mutations --count 500 --seed 1``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from tests.campaigns import report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description="Attack the library.")
    parser.add_argument("name", choices=["mutations", "jsonl", "texts", "kills"])
    parser.add_argument("--count", type=int, default=100, help="attacks; of kills those for each command, 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the number of one mutant, line or text, or a pattern of commands")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    outcomes = []
    for outcome in _campaign(options):
        outcomes.append(outcome)
        if outcome.failed:
            print(f"{outcome.verdict}: {outcome.attack}", file=sys.stderr, flush=True)
    print(report.table(outcomes))
    print(f"{options.name}: count {options.count}, seed {options.seed}, {time.monotonic() - began:.0f} s")
    return 1 if not outcomes or any(outcome.failed for outcome in outcomes) else 0


def _campaign(options: argparse.Namespace) -> Iterator[report.Outcome]:
    """The campaign of that name; each imports the whole library."""
    if options.name == "kills":
        from tests.campaigns import kills

        return kills.campaign(options.count, options.seed, only=options.only)
    from tests.campaigns import jsonl, mutations, texts

    only = None if options.only is None else int(options.only)
    kind = {"jsonl": jsonl, "texts": texts, "mutations": mutations}[options.name]
    return kind.campaign(options.count, options.seed, only=only)


if __name__ == "__main__":
    sys.exit(main())
