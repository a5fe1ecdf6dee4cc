"""Random walks and a short run of every offline algorithm on them, for the tests of recipes."""

from pathlib import Path

from torchrl_lang.__main__ import main

GRAPH = ["--nodes", "10", "--max-turns", "7"]
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16"]
SHORT = [*TINY, "--steps", "4", "--eval-every", "2", "--log-every", "1"]
ARCHER = ["--value-steps", "2", "--draws", "8"]  # of 100 and 512
ALGORITHMS: dict[str, list[str]] = {
    "bc": [],
    "ilql": ["--start", "bc"],
    "cql": [],
    "bcq": [],
    "psi": ["--prior", "bc"],
    "utterance-ilql": ["--log-prob-weight", "0.5"],
    "chai": ["--start", "bc", "--candidates", "4", "--proposals", "2"],
    "dt": [],
    "qsft": ["--start", "bc"],
    "oreo": ["--start", "bc"],
    "dpo": ["--start", "bc"],
    "ipo": ["--start", "bc", "--pairs", "20"],
    "kto": ["--start", "bc"],
}
"""The offline algorithms with further options of their runs, in which ``bc`` is the run of that name."""


def generate(folder: Path, games: int = 120) -> None:
    """Generate a dataset of random walks in ``folder / "data"``."""
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *GRAPH, "--games", str(games)]) == 0


def train(folder: Path, recipe: str, out: Path | str, *more: object) -> int:
    """Train on the dataset in a folder; returns the exit status."""
    options = [str(folder / "bc") if word == "bc" else str(word) for word in more]
    return main(["train", recipe, "--data", str(folder / "data"), "--out", str(folder / out), *SHORT, *options])
