"""Options of the recipes that find their task in a dataset or a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrl_lang.recipes.options import Options, option, pairs
from torchrl_lang.recipes.tasks import OWN_TASK, find_task

if TYPE_CHECKING:
    from torchrl_lang.recipes.tasks.base import Task

__all__ = ["TaskOptions"]


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Options):
    """Base of these options."""

    task: str | None = option(
        None, f"name of the task, to check it, or {OWN_TASK}: the code of a task or environment factory of your own"
    )
    option: dict[str, Any] = pairs("options of an environment factory given as --task, to check them: JSON or texts")

    def given_task(self) -> type[Task] | None:
        """The task that was given, if any; its module is imported.

        Raises:
            ValueError: there is no such task, or only options of one were given.
        """
        if self.task is None and self.option:
            raise ValueError(f"--option {self.option} is for an environment factory: give it as --task {OWN_TASK}.")
        return None if self.task is None else find_task(self.task, self.option)
