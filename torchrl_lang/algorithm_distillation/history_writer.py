"""Record learning histories part by part; a killed recording is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import tensordict
import torch
from tensordict import TensorDictBase

import torchrl_lang
from torchrl_lang._checks import Count, checked
from torchrl_lang._files import allocate_file, flush, folder_lock
from torchrl_lang.algorithm_distillation import history
from torchrl_lang.algorithm_distillation.history import MANIFEST, HistoryManifest, LearningHistory, Part, StoredEntry
from torchrl_lang.algorithm_distillation.sources import TabularSource


class HistoryWriter:
    """Context manager that appends parts of a learning history to a folder.

    The first part creates the files, which hold the planned steps of all streams. A part is flushed to disk before the
    manifest lists it, so that a killed process leaves the parts before, and the next writer continues after them.

    Args:
        folder: the folder.
        tasks: a description of each task as JSON, with its number as ``"task"``.
        streams: number of streams of each task.
        steps: planned number of steps of each stream.
        source: a description of the learners as JSON.
        resume: continue a history in ``folder``, which must have been begun with the same arguments.

    Raises:
        FileExistsError: ``folder`` holds a history and ``resume`` is False, or something else, or another process is
            writing it.
        FileError: the history to resume is damaged.
        ValueError: the history to resume was begun with other arguments.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.algorithm_distillation import HistoryWriter
        >>> from torchrl_lang.algorithm_distillation.sources import QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = QLearning(DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 2]), 60)
        >>> with tempfile.TemporaryDirectory() as home, HistoryWriter(home, source.tasks, 2, 60) as writer:
        ...     for block in source.blocks(20):
        ...         writer.extend(block)
        ...     writer.recorded
        60
    """

    @checked
    def __init__(
        self,
        folder: str | Path,
        tasks: Sequence[Mapping[str, Any]],
        streams: Count,
        steps: Count,
        *,
        source: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        history.check_tasks(tasks)
        self.folder, self.resume = Path(folder), resume
        self._shape = torch.Size([len(tasks), streams, steps])
        about = {"tasks": list(tasks), "streams": streams, "steps": steps, "source": source or {}}
        self._about = json.loads(json.dumps(about))  # as the manifest returns it: tuples become lists
        self._parts: tuple[Part, ...] = ()
        self._entries: dict[str, StoredEntry] = {}
        self._steps: TensorDictBase
        self._open: ExitStack | None = None

    @property
    def recorded(self) -> int:
        """Number of steps of each stream that were recorded."""
        return self._parts[-1].end if self._parts else 0

    def __enter__(self) -> HistoryWriter:
        with ExitStack() as stack:
            stack.enter_context(folder_lock(self.folder))
            if (self.folder / MANIFEST).is_file():
                self._continue()
            elif any(path.name != history.ROWS and not path.name.startswith(".") for path in self.folder.iterdir()):
                raise FileExistsError(f"{self.folder} holds something other than a learning history.")
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        cast(ExitStack, self._open).close()
        self._open = None

    def _continue(self) -> None:
        """Continue after the parts in the folder."""
        if not self.resume:
            raise FileExistsError(f"{self.folder} holds a learning history: give another folder, or resume=True.")
        manifest = history.read_manifest(self.folder)
        if other := [name for name, value in self._about.items() if getattr(manifest, name) != value]:
            raise ValueError(f"The history in {self.folder} was begun with other {other}: give another folder.")
        self._entries, self._parts = manifest.entries, manifest.parts
        self._steps = history.map_steps(self.folder, self._entries, self._shape).view(self._shape)
        history.verify_parts(self.folder, self._steps, self._parts)

    def extend(self, steps: TensorDictBase) -> None:
        """Append steps ``[tasks, streams, L]`` as a part.

        Raises:
            KeyError, ValueError: the steps lack an entry, have others than those before, do not continue them, or are
                more than planned. Nothing is written then.
            RuntimeError: the writer is used outside of its ``with`` block.
            OSError: writing failed, for instance because the disk is full.
        """
        if self._open is None:
            raise RuntimeError("A HistoryWriter has the lock of its folder in a with statement only.")
        first, end = self.recorded, self.recorded + steps.shape[-1]
        if steps.ndim != 3 or steps.shape[:2] != self._shape[:2] or not first < end <= self._shape[2]:
            planned = [*self._shape[:2], self._shape[2] - first]
            raise ValueError(f"A part has batch size {planned} at most, got {list(steps.shape)}.")
        entries = history.entries_of(steps)
        if entries != (self._entries or entries):
            raise ValueError(f"The steps have the entries {entries}, but those before had {self._entries}.")
        history.check_steps(steps, self._steps[..., first - 1 : first] if first else None, first)
        if not self._entries:
            self._begin(entries)
        block = self._steps[..., first:end]
        block.update_(steps)
        for key in entries:
            flush(history.entry_file(self.folder, key))
        parts = (*self._parts, Part(first=first, steps=end - first, sha256=history.digests_of(block)))
        versions = {each.__name__: str(each.__version__) for each in (torchrl_lang, tensordict, torch)}
        manifest = HistoryManifest(**self._about, entries=self._entries, parts=parts, created_by=versions)
        manifest.write(self.folder / MANIFEST)
        self._parts = parts

    def read(self, first: int, end: int) -> TensorDictBase:
        """Recorded steps, ``[tasks, streams, end - first]``."""
        return self._steps[..., first:end]

    def _begin(self, entries: dict[str, StoredEntry]) -> None:
        """Create the files, of zeros, with their space on the disk."""
        (self.folder / history.ROWS).mkdir(exist_ok=True)
        for key, kind in entries.items():
            allocate_file(history.entry_file(self.folder, key), kind.size(math.prod(self._shape)))
        flush(self.folder / history.ROWS)
        self._steps, self._entries = history.map_steps(self.folder, entries, self._shape).view(self._shape), entries


def record_history(
    folder: str | Path, source: TabularSource, *, part: int = 1000, resume: bool = True
) -> LearningHistory:
    """Record the history of a source algorithm, or the rest of one whose recording was killed, and open it.

    To resume, the source runs from its beginning, and its steps are compared with those that were recorded.

    Args:
        folder: the folder.
        source: the source algorithm, or another object with its ``tasks``, ``streams``, ``steps``, ``describe()`` and
            ``blocks()``.
        part: steps of each stream in a part.
        resume: continue a history in ``folder``.

    Raises:
        ValueError: the folder holds a history of another source.

    Other errors are those of :class:`HistoryWriter`. See :func:`load_history` for an example.
    """
    about = source.describe()
    with HistoryWriter(folder, source.tasks, source.streams, source.steps, source=about, resume=resume) as writer:
        end = 0
        for block in source.blocks(part):
            first, end = end, end + block.shape[-1]
            done = min(max(writer.recorded - first, 0), block.shape[-1])
            if done and (writer.read(first, first + done) != block[..., :done]).any():
                raise ValueError(f"The history in {folder} is that of another source: give another folder.")
            if done < block.shape[-1]:
                writer.extend(block[..., done:])
    return history.load_history(folder, verify=False)  # extend() checked each part
