"""Checkpoints of the whole state of a training run, written atomically and without pickle."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tensordict
import torch
import torch.distributed.checkpoint as dcp
import torchrl
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

import torchrl_lang
from torchrl_lang import _files, _ranks
from torchrl_lang._checks import Count, checked
from torchrl_lang._files import FileError, Record, RecordFolder, shorten
from torchrl_lang.modules.sharding import any_sharded, load_whole
from torchrl_lang.training.metrics import nonfinite_parameters
from torchrl_lang.training.state import CheckpointError, join_state, split_state

# torchrl.checkpoint also writes atomically, but reads a pickled payload if there is one, saves replay buffers with
# torch.save, does not flush to disk before it renames, has no checksums, and needs the metric at every save, although
# ours is known only after an evaluation.

_NAME = re.compile(r"step-(?P<step>\d+)(-(?P<attempt>\d+))?")
_MANIFEST, _TENSORS, _STATE, _SHARDS = "manifest.json", "tensors.safetensors", "state.json", "shards"


class _Manifest(Record):
    """The content of a checkpoint's manifest."""

    FORMAT = "torchrl_lang checkpoint"
    VERSION = 4

    step: Annotated[int, Field(ge=0)]
    metrics: dict[str, float]
    """The finite ones."""
    objects: tuple[str, ...]
    versions: dict[str, str]


_FOLDER = RecordFolder(
    _Manifest, _MANIFEST, (_TENSORS, _STATE), remedy="delete the folder of this checkpoint to continue without it"
)


class Stateful(Protocol):
    """Anything with a state: modules, optimizers, schedulers, samplers, random generators."""

    def state_dict(self) -> Any:
        """The state: nested dicts, lists and tuples of tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


class Checkpointer:
    """Writes and restores checkpoints of registered objects in a folder.

    Each checkpoint is a folder with ``tensors.safetensors``, ``state.json`` for everything that is not a tensor, and
    ``manifest.json`` with step, metrics and versions, and ``checksums.json``. It is written under a temporary name,
    flushed to disk and then renamed, so a killed run leaves only complete checkpoints. The next :meth:`save` or
    :meth:`restore` deletes what the killed run was writing or deleting. Of sharded models and optimizers each process
    writes its own part into the folder ``shards`` (:mod:`torch.distributed.checkpoint`, as safetensors); any number of
    processes can restore them, sharded or not.

    For a run that resumes to the same numbers, register everything that the next step depends on: modules, optimizer,
    scheduler, target updater, the replay buffer's ``sampler`` (not the buffer, which would copy the dataset into every
    checkpoint; and without prefetching, which samples ahead of the step), and a
    :class:`~torchrl_lang.training.RandomState` with the generators in use.

    Args:
        folder: folder of the checkpoints; created at the first save.
        keep: number of latest checkpoints to keep, in addition to the best one.
        best_by: the metric that defines the best checkpoint, larger is better, of equals the latest. Checkpoints
            without it are never best.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.training import Checkpointer
        >>> layer = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpointer = Checkpointer(folder).register("model", layer)
        ...     first = checkpointer.restore()  # no checkpoint yet
        ...     _ = checkpointer.save(10, {"return": -2.0})
        ...     _ = torch.nn.init.zeros_(layer.weight)
        ...     step = checkpointer.restore()
        >>> first, step, bool(layer.weight.any())
        (None, 10, True)
    """

    @checked
    def __init__(self, folder: str | Path, *, keep: Count = 2, best_by: str = "return") -> None:
        self.folder, self.keep, self.best_by = Path(folder), keep, best_by
        self._objects: dict[str, Stateful] = {}
        self._damaged: set[Path] = set()

    def register(self, name: str, obj: Stateful) -> Checkpointer:
        """Add ``obj`` to all later checkpoints.

        Returns itself, for chaining.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._objects:
            raise ValueError(f"'{name}' is registered already: give the second object another name.")
        self._objects[name] = obj
        return self

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Path:
        """Write a checkpoint, then delete old ones.

        Where several processes train together, all of them call it; the first one writes all but the others' shards.

        Args:
            step: number of training steps done. A checkpoint of the same step is replaced.
            metrics: metrics to store in it; if ``best_by`` is among them, it can become the best.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: a parameter of a registered module or optimizer is not finite, so training could not continue
                from the checkpoint; or there is a checkpoint of a later step (from another run, or an earlier one was
                restored), so ``"latest"`` would be the wrong one. Nothing is written then.
        """
        if nonfinite := nonfinite_parameters(self._objects):
            kept = f"No checkpoint was written, those of steps {self.steps()} are kept: reduce the learning rate."
            raise ValueError(f"At step {step} these parameters are not finite: {shorten(nonfinite)}. {kept}")
        if (latest := max(self.steps(), default=step)) > step:
            remedy = "continue from the latest one, delete the later ones, or use another folder"
            raise ValueError(f"{self.folder} holds a checkpoint of step {latest}, later than {step}: {remedy}.")
        # A new name even for an old step, because renaming onto an existing folder is not atomic.
        attempt = max((again for number, again, _ in self._folders() if number == step), default=-1) + 1
        path = self.folder / (f"step-{step:09d}" + (f"-{attempt}" if attempt else ""))
        state = {name: obj.state_dict() for name, obj in self._objects.items()}  # of all processes, see PerRank
        if _ranks.is_first() or any_sharded():
            self._write(path, step, metrics or {}, state)
        if _ranks.is_first():
            self.prune()
        _ranks.wait()
        return path

    def _write(self, path: Path, step: int, metrics: Mapping[str, float], state: dict[str, Any]) -> None:
        tree, tensors = split_state(state)
        shards = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
        if _ranks.is_first():
            _files.remove_leftovers(self.folder)
        modules = {"torchrl_lang": torchrl_lang, "torch": torch, "torchrl": torchrl, "tensordict": tensordict}
        versions = {name: str(module.__version__) for name, module in modules.items()}
        scores = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        manifest = _Manifest(step=step, metrics=scores, objects=tuple(self._objects), versions=versions)
        with _FOLDER.write(path, manifest) if _ranks.is_first() else nullcontext(path) as folder:
            if shards:
                folder = _ranks.from_first(lambda: folder)
                to = dcp.HuggingFaceStorageWriter(str(folder / _SHARDS), save_distributed=True)
                dcp.save(shards, storage_writer=to)  # ends when all processes have written
            if _ranks.is_first():
                save_file({name: value for name, value in tensors.items() if name not in shards}, folder / _TENSORS)
                _files.write_json(folder / _STATE, tree)

    def prune(self) -> None:
        """Delete all checkpoints but the ``keep`` latest and the best.

        :meth:`save` does it, unless the run is killed in between, and after its last checkpoint a run saves no more.
        """
        wanted = {*list(self._at_hand().values())[-self.keep :], self._best()}
        for _, _, path in self._folders():
            if path not in wanted:
                _files.remove_folder(path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def restore(self, step: int | Literal["latest", "best"] = "latest") -> int | None:
        """Load a checkpoint into the registered objects.

        If the latest one is damaged, the one before it is loaded with a warning, and the next save deletes the damaged
        one. For ``"best"`` or a step no other checkpoint is loaded instead.

        Args:
            step: the step, or ``"latest"``, or ``"best"`` by the metric ``best_by``.

        Returns:
            Its step, or ``None`` if there is no checkpoint yet for ``"latest"`` or ``"best"``: begin at step 0.

        Raises:
            CheckpointError: there is no checkpoint of that step, it is damaged (for "latest": all are), or it lacks a
                registered object. Damaged or missing files are detected before any object changes.
        """
        if _ranks.is_first():
            _files.remove_leftovers(self.folder)
        if step != "latest":
            path = self.path(step)
            if path is None and isinstance(step, int):
                raise CheckpointError(f"No checkpoint of step {step} in {self.folder}, only of steps {self.steps()}.")
            return None if path is None else self._load(path, *_read(path))
        damaged: dict[Path, CheckpointError] = {}
        for path in reversed([path for _, _, path in self._folders() if path not in self._damaged]):
            try:
                info, state = _read(path)
            except CheckpointError as error:
                damaged[path] = error
                continue
            for other, reason in damaged.items():
                self._leave_out(other, reason)
            return self._load(path, info, state)
        self._damaged |= damaged.keys()
        if self._damaged:  # one error instead of a warning for each
            latest = f" The latest: {next(iter(damaged.values()))}" if damaged else ""
            remedy = "delete them to begin at step 0"
            raise CheckpointError(f"All checkpoints in {self.folder} are damaged: {remedy}.{latest}")
        return None

    def _load(self, path: Path, info: _Manifest, state: Mapping[str, Any]) -> int:
        if missing := self._objects.keys() - state.keys():
            raise CheckpointError(f"{path} has no state for {sorted(missing)}: it holds {list(info.objects)}.")
        for name, obj in self._objects.items():
            try:
                load_whole(obj, state[name])
            except Exception as error:
                raise CheckpointError(f"The state of '{name}' in {path} does not fit: {error}") from error
        return info.step

    def _leave_out(self, path: Path, error: CheckpointError) -> None:
        self._damaged.add(path)
        warnings.warn(f"Skipped a damaged checkpoint, which the next save deletes. {error}", stacklevel=2)

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, in order."""
        return list(self._at_hand())

    def path(self, step: int | Literal["latest", "best"] = "latest") -> Path | None:
        """Folder of a checkpoint, or ``None``."""
        if step == "best":
            return self._best()
        at_hand = self._at_hand()
        return at_hand.get(max(at_hand, default=0) if step == "latest" else step)

    def metrics(self, step: int | Literal["latest", "best"] = "latest") -> dict[str, float]:
        """The metrics stored in a checkpoint; empty if there is none."""
        path = self.path(step)
        return {} if path is None else _read(path, with_state=False)[0].metrics

    def _best(self) -> Path | None:
        best, most = None, -math.inf
        for path in self._at_hand().values():
            try:
                score = _read(path, with_state=False)[0].metrics.get(self.best_by, -math.inf)
            except CheckpointError as error:
                self._leave_out(path, error)
                continue
            if -math.inf < score and score >= most:  # of several best ones the latest, which has trained longest
                best, most = path, score
        return best

    def _at_hand(self) -> dict[int, Path]:
        """Undamaged folder of each step, in order; for a step that was saved again the last one."""
        return {step: path for step, _, path in self._folders() if path not in self._damaged}

    def _folders(self) -> list[tuple[int, int, Path]]:
        """``(step, attempt, folder)`` of every checkpoint, in order."""
        found = {path: _NAME.fullmatch(path.name) for path in self.folder.glob("step-*")}
        return sorted((int(match["step"]), int(match["attempt"] or 0), path) for path, match in found.items() if match)


def _read(path: Path, *, with_state: bool = True) -> tuple[_Manifest, dict[str, Any]]:
    """The manifest, and the state dict of each object, by name; tensors are on the CPU."""
    remedy, state = _FOLDER.remedy, {}
    try:
        manifest = _Manifest.read(path / _MANIFEST, remedy=remedy)
        if with_state:
            _files.verify_checksums(path, remedy=remedy, needs=(_MANIFEST, _TENSORS, _STATE))
            tensors = _files.read_tensors(path / _TENSORS, remedy=remedy) | _read_shards(path / _SHARDS)
            state = join_state(_files.read_json(path / _STATE, remedy=remedy), tensors)
    except FileError as error:
        raise CheckpointError(str(error)) from error
    if (match := _NAME.fullmatch(path.name)) and int(match["step"]) != manifest.step:
        raise CheckpointError(f"{path} holds the checkpoint of step {manifest.step}: it was renamed; rename it back.")
    return manifest, state


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole tensors whose parts are in a folder; none if it does not exist."""
    if not folder.exists():
        return {}
    reader = dcp.HuggingFaceStorageReader(str(folder))
    sizes: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    whole = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in sizes.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        dcp.load(whole, storage_reader=reader, no_dist=True)
    return whole
