"""Checkpoints of everything that a training run remembers, written atomically and without pickle."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torchrl_lang.training.checkpoint_files import (
    CheckpointError,
    is_checkpoint,
    read_checkpoint,
    read_manifest,
    remove_checkpoint,
    write_checkpoint,
)

__all__ = ["Checkpointer", "Stateful"]

_NAME = re.compile(r"step-(?P<step>\d+)(-(?P<attempt>\d+))?")


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say and take its state: modules, optimisers, schedulers, samplers, random streams."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state."""


class Checkpointer:
    """Writes and restores checkpoints of registered objects in a folder.

    Each checkpoint is a folder of its own: ``tensors.safetensors``, ``state.json`` for all that is no tensor, and
    ``manifest.json`` with step, metrics, versions and checksums. It is written under a temporary name, flushed to disk
    and then renamed, so that a run killed at any moment leaves only whole checkpoints behind.

    For a run that resumes to the numbers of one never killed, register whatever the next step depends on: modules,
    optimiser, scheduler, target updater, the replay buffer's ``sampler`` (not the buffer: that would copy the data set
    into every checkpoint; and without prefetching, which draws ahead of the step), and a
    :class:`~torchrl_lang.training.RandomState` with the generators in use.

    Args:
        folder: where checkpoints go; made at the first save.
        keep: so many of the latest checkpoints are kept, and the best one besides.
        best_by: the metric that says which is best, larger being better. Checkpoints saved without it are never best.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.training import Checkpointer
        >>> layer = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpointer = Checkpointer(folder).register("model", layer)
        ...     first = checkpointer.restore()  # nothing there yet
        ...     _ = checkpointer.save(10, {"return": -2.0})
        ...     _ = torch.nn.init.zeros_(layer.weight)
        ...     step = checkpointer.restore()
        >>> first, step, bool(layer.weight.any())
        (None, 10, True)
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, best_by: str = "return") -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}.")
        self.folder = Path(folder)
        self.keep = keep
        self.best_by = best_by
        self._objects: dict[str, Stateful] = {}

    def register(self, name: str, obj: Stateful) -> Checkpointer:
        """Make ``obj`` part of every checkpoint from now on. Returns itself, for chaining."""
        if name in self._objects:
            raise ValueError(f"'{name}' is registered already: give the second object another name.")
        if not isinstance(obj, Stateful):
            raise TypeError(f"'{name}' is a {type(obj).__name__} without state_dict() and load_state_dict().")
        self._objects[name] = obj
        return self

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Path:
        """Write a checkpoint, then delete those that are no longer wanted.

        Args:
            step: number of training steps done. A checkpoint of the same step is replaced.
            metrics: figures to keep beside it; ``best_by`` among them makes it a candidate for the best.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: there is a checkpoint of a later step, from another run or from before an earlier one was
                restored; going on would make "latest" mean the wrong one.
        """
        folders = self._folders()
        latest = max((number for number, _, _ in folders), default=step)
        if latest > step:
            raise ValueError(
                f"{self.folder} holds a checkpoint of step {latest}, later than {step}: continue from the latest one, "
                "delete the later ones, or use another folder."
            )
        # A new name even where the step is an old one: a rename onto a folder could not be atomic.
        attempt = max((again for number, again, _ in folders if number == step), default=-1) + 1
        path = self.folder / (f"step-{step:09d}" + (f"-{attempt}" if attempt else ""))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, {name: obj.state_dict() for name, obj in self._objects.items()}, step, metrics or {})
        self._prune()
        return path

    def _prune(self) -> None:
        wanted = {*list(self._at_hand().values())[-self.keep :], self._best()}
        for _, _, path in self._folders():
            if path not in wanted:
                remove_checkpoint(path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, step: int | Literal["latest", "best"] = "latest") -> int | None:
        """Load a checkpoint into the registered objects.

        Args:
            step: which one; ``"best"`` by the metric ``best_by``.

        Returns:
            Its step, or ``None`` where there is none yet for ``"latest"`` or ``"best"``: begin at step 0.

        Raises:
            CheckpointError: there is none of that step, it is damaged, or a registered object is not in it. What is
                damaged or missing is found before any object has changed.
        """
        path = self.path(step)
        if path is None:
            if isinstance(step, int):
                raise CheckpointError(f"No checkpoint of step {step} in {self.folder}, only of steps {self.steps()}.")
            return None
        manifest = read_manifest(path)
        missing = [name for name in self._objects if name not in manifest["objects"]]
        if missing:
            raise CheckpointError(f"{path} has no state for {missing}: it holds {manifest['objects']}.")
        state = read_checkpoint(path)
        for name, obj in self._objects.items():
            try:
                obj.load_state_dict(state[name])
            except Exception as error:
                raise CheckpointError(f"The state of '{name}' in {path} does not fit: {error}") from error
        return int(manifest["step"])

    def steps(self) -> list[int]:
        """Steps of the checkpoints at hand, in order."""
        return list(self._at_hand())

    def path(self, step: int | Literal["latest", "best"] = "latest") -> Path | None:
        """Folder of a checkpoint, or ``None``."""
        if step == "best":
            return self._best()
        at_hand = self._at_hand()
        return at_hand.get(max(at_hand, default=0) if step == "latest" else step)

    def metrics(self, step: int | Literal["latest", "best"] = "latest") -> dict[str, float]:
        """The figures that were saved with a checkpoint; none where there is no such checkpoint."""
        path = self.path(step)
        return {} if path is None else read_manifest(path)["metrics"]

    def _best(self) -> Path | None:
        scores = {path: read_manifest(path)["metrics"].get(self.best_by, math.nan) for path in self._at_hand().values()}
        ranked = [path for path, score in scores.items() if not math.isnan(score)]
        return max(ranked, key=scores.__getitem__, default=None)  # of equals the earliest

    def _at_hand(self) -> dict[int, Path]:
        """Folder of each step, in order; of a step that was saved again the last one."""
        return {step: path for step, _, path in self._folders()}

    def _folders(self) -> list[tuple[int, int, Path]]:
        """``(step, attempt, folder)`` of every checkpoint, in order."""
        found = []
        for path in self.folder.glob("step-*"):
            match = _NAME.fullmatch(path.name)
            if match and is_checkpoint(path):
                found.append((int(match["step"]), int(match["attempt"] or 0), path))
        return sorted(found)
