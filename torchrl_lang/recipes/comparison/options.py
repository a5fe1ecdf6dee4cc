"""The options of commands that train several methods on the same data and compare them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchrl_lang._checks import one_of
from torchrl_lang.recipes.offline_methods import METHODS
from torchrl_lang.recipes.options import Options, check_record, option, required, write_options

__all__ = ["ComparisonOptions"]

_RECORD = "options.json"


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(Options):
    """Base of the options of comparisons.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.comparison import ComparisonOptions
        >>> options = ComparisonOptions(out=Path("runs/comparison"), steps=100, width=64)
        >>> options.of_training(seed=1)
        {'steps': 100, 'seed': 1, 'width': 64}
    """

    out: Path = required("folder of all results; the same command continues")
    folder: Path | None = option(None, "folder of the data; none: they are made in --out")
    methods: tuple[str, ...] = option(("bc", "best-30", "best-10", "ilql"), f"methods among {', '.join(METHODS)}")
    seeds: int = option(1, "training seeds, from 0 on", at_least=1)
    steps: int = option(3000, "training steps of each run", at_least=1)
    layers: int | None = option(None, "transformer blocks; none: the task's preset", at_least=1)
    width: int | None = option(None, "hidden size; none: the task's preset", at_least=1)
    batch_size: int | None = option(None, "episodes in a batch; none: the task's preset", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.methods:
            one_of("methods", name, list(METHODS))

    def record(self, *free: str) -> None:
        """Record the options, or check that results of earlier calls in the folder go together with them.

        Args:
            *free: further options that may differ between calls, beside the folder, the methods and the seeds.

        Raises:
            ValueError: another option differs.
        """
        record, fixed = self.out / _RECORD, replace(self, folder=self.folder and self.folder.resolve())
        if record.exists():
            check_record(record, fixed, free=("out", "methods", "seeds", *free))
        write_options(record, fixed)

    def of_training(self, seed: int) -> dict[str, Any]:
        """The options of ``train`` that all runs of a seed share."""
        sizes = {"layers": self.layers, "width": self.width, "batch-size": self.batch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        return {"steps": self.steps, "seed": seed, **given}

    def as_json(self, minutes: float) -> dict[str, Any]:
        """What ``results.json`` begins with: the options, and how long the call took."""
        content = json.loads(json.dumps(asdict(self), default=str))
        return {"options": content, "minutes_of_this_call": round(minutes, 2)}
