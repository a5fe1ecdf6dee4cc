"""Run the commands that train and compare methods in this process, count what they do, and interrupt them."""

from pathlib import Path
from typing import Any

import pytest

from torchrl_lang.__main__ import main
from torchrl_lang.recipes import compare


class Trainings:
    """Trains in this process, and remembers what."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.done: list[str] = []
        self.stop_after = stop_after

    def __call__(self, commands: dict[str, list[str]]) -> None:
        for out, words in commands.items():
            if len(self.done) == self.stop_after:
                raise KeyboardInterrupt
            assert main(words) == 0
            self.done.append(Path(out).name)

    def take_over(self, patch: pytest.MonkeyPatch, owner: Any = compare) -> None:
        """Train what commands of the module ``owner`` plan from now on."""
        patch.setattr(owner, "run_in_parallel", self)


def recorded_evaluations(task: type, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Split, seed and number of games of each evaluation from now on, outside of trainings."""
    calls, real = [], task.evaluate

    def evaluate(self: Any, policy: Any, **options: Any) -> Any:
        if options.get("split"):
            calls.append((options["split"], options["seed"], options["games"]))
        return real(self, policy, **options)

    monkeypatch.setattr(task, "evaluate", evaluate)
    return calls
