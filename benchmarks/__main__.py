"""Run all benchmarks: ``python -m benchmarks [--quick] [NAME ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.common import RESULTS, record, table

NAMES = ("wordle_env", "data_pipeline", "training_step", "large_vocabulary", "decoding", "kl_transforms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; nothing is recorded")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose among {', '.join(NAMES)}")
    missed = False
    for name in options.names or NAMES:
        print(f"\n{name}: {importlib.import_module(f'benchmarks.{name}').__doc__}", flush=True)
        rows = importlib.import_module(f"benchmarks.{name}").run(quick=options.quick)
        before = {} if options.quick else record(rows, RESULTS / f"{name}.json")
        print(table(rows, before))
        missed = missed or any(entry["ok"] is False for entry in rows)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
