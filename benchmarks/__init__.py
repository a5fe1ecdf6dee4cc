"""Speed, as ratios in one run. ``python -m benchmarks`` prints a table and writes ``benchmarks/results``."""
