"""Checkpoints of everything that a training run remembers, written atomically and without pickle."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torchrl_lang.storage import remove_folder, remove_leftovers
from torchrl_lang.storage.errors import shorten
from torchrl_lang.training.checkpoint_files import (
    CheckpointError,
    CheckpointInfo,
    read_checkpoint,
    read_info,
    write_checkpoint,
)
from torchrl_lang.training.finite import nonfinite_parameters

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
    and then renamed, so that a run killed at any moment leaves only whole checkpoints behind. What it was writing or
    deleting then is deleted by the next :meth:`save` or :meth:`restore`.

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
        self._damaged: set[Path] = set()

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
            ValueError: a parameter of a registered module or optimiser is not finite, so that training could not go on
                from the checkpoint; or there is a checkpoint of a later step, from another run or from before an
                earlier one was restored, so that "latest" would mean the wrong one. Nothing was written then.
        """
        nonfinite = nonfinite_parameters(self._objects)
        if nonfinite:
            raise ValueError(
                f"At step {step} these parameters are not finite: {shorten(nonfinite)}. No checkpoint was written, "
                f"those of steps {self.steps()} are kept: look at the losses before, and lower the learning rate."
            )
        latest = max(self.steps(), default=step)
        if latest > step:
            raise ValueError(
                f"{self.folder} holds a checkpoint of step {latest}, later than {step}: continue from the latest one, "
                "delete the later ones, or use another folder."
            )
        # A new name even where the step is an old one: a rename onto a folder could not be atomic.
        attempt = max((again for number, again, _ in self._folders() if number == step), default=-1) + 1
        path = self.folder / (f"step-{step:09d}" + (f"-{attempt}" if attempt else ""))
        remove_leftovers(self.folder)
        write_checkpoint(path, {name: obj.state_dict() for name, obj in self._objects.items()}, step, metrics or {})
        self._prune()
        return path

    def _prune(self) -> None:
        wanted = {*list(self._at_hand().values())[-self.keep :], self._best()}
        for _, _, path in self._folders():
            if path not in wanted:
                remove_folder(path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, step: int | Literal["latest", "best"] = "latest") -> int | None:
        """Load a checkpoint into the registered objects.

        Where the latest one is damaged, the one before it is loaded, with a warning that says so; the next save then
        deletes what is damaged. No other checkpoint is ever loaded in place of the best or of a step.

        Args:
            step: which one; ``"best"`` by the metric ``best_by``.

        Returns:
            Its step, or ``None`` where there is none yet for ``"latest"`` or ``"best"``: begin at step 0.

        Raises:
            CheckpointError: there is none of that step, it is damaged (as "latest": all are), or a registered object is
                not in it. What is damaged or missing is found before any object has changed.
        """
        remove_leftovers(self.folder)
        if step == "latest":
            return self._restore_latest()
        path = self.path(step)
        if path is None and isinstance(step, int):
            raise CheckpointError(f"No checkpoint of step {step} in {self.folder}, only of steps {self.steps()}.")
        return None if path is None else self._load(path, *_read(path))

    def _restore_latest(self) -> int | None:
        for _, _, path in reversed(self._whole()):
            try:
                info, state = _read(path)
            except CheckpointError as error:
                self._leave_out(path, error)
            else:
                return self._load(path, info, state)
        if self._damaged:
            raise CheckpointError(f"All checkpoints in {self.folder} are damaged: delete them to begin at step 0.")
        return None

    def _load(self, path: Path, info: CheckpointInfo, state: Mapping[str, Any]) -> int:
        missing = [name for name in self._objects if name not in state]
        if missing:
            raise CheckpointError(f"{path} has no state for {missing}: it holds {info.objects}.")
        for name, obj in self._objects.items():
            try:
                obj.load_state_dict(state[name])
            except Exception as error:
                raise CheckpointError(f"The state of '{name}' in {path} does not fit: {error}") from error
        return info.step

    def _leave_out(self, path: Path, error: CheckpointError) -> None:
        self._damaged.add(path)
        warnings.warn(f"A damaged checkpoint is left out, and deleted at the next save. {error}", stacklevel=2)

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
        return {} if path is None else read_info(path).metrics

    def _best(self) -> Path | None:
        scores = {}
        for path in self._at_hand().values():
            try:
                scores[path] = read_info(path).metrics.get(self.best_by, math.nan)
            except CheckpointError as error:
                self._leave_out(path, error)
        ranked = [path for path, score in scores.items() if not math.isnan(score)]
        return max(ranked, key=scores.__getitem__, default=None)  # of equals the earliest

    def _at_hand(self) -> dict[int, Path]:
        """Folder of each step, in order; of a step that was saved again the last one."""
        return {step: path for step, _, path in self._whole()}

    def _whole(self) -> list[tuple[int, int, Path]]:
        """:meth:`_folders` without those that were found damaged."""
        return [found for found in self._folders() if found[2] not in self._damaged]

    def _folders(self) -> list[tuple[int, int, Path]]:
        """``(step, attempt, folder)`` of every checkpoint, in order."""
        matches = {path: _NAME.fullmatch(path.name) for path in self.folder.glob("step-*")}
        return sorted(
            (int(match["step"]), int(match["attempt"] or 0), path) for path, match in matches.items() if match
        )


def _read(path: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """A checkpoint's manifest and state.

    Raises:
        CheckpointError: it is damaged.
    """
    info, match = read_info(path), _NAME.fullmatch(path.name)
    if match is not None and int(match["step"]) != info.step:
        raise CheckpointError(f"{path} holds the checkpoint of step {info.step}: it was renamed; rename it back.")
    return info, read_checkpoint(path)
