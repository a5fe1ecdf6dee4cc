"""Record what a language model asked, answered and earned while it was trained: a learning history of texts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase

from torchrl_lang import _files
from torchrl_lang._files import FileError, Record, shorten
from torchrl_lang.algorithm_distillation.language import records
from torchrl_lang.algorithm_distillation.language.records import TextRecord
from torchrl_lang.schema import AGENT_MASK, ROW_KEYS, TOKEN_LOG_PROB, TRAIN_MASK
from torchrl_lang.text import Tokenizer, from_row

_MANIFEST = "manifest.json"
_REMEDY = "the history of the run is damaged, restore the file or record the run again"


class _Run(Record):
    """The description of a recorded run."""

    FORMAT: ClassVar[str] = "torchrl_lang run history"
    VERSION: ClassVar[int] = 2

    config: dict[str, Any]
    epochs: tuple[str, ...]
    """The SHA-256 of the file of each epoch, from 1."""
    out: str
    """Absolute path of the folder of the run that recorded last; empty if it is unknown."""


class RunRecorder:
    """Context manager that appends the episodes of each epoch of a training run to the folder ``home/run-NAME``.

    The folder holds one ``epoch-000001.jsonl`` per epoch with a :class:`TextRecord` per line, and ``manifest.json``
    with the configuration and checksums. Each file is written in one step, and a killed run leaves whole epochs. A run
    that is resumed calls :meth:`rewind` with the epoch of its checkpoint, so that no epoch is recorded twice.

    Args:
        home: folder of the histories of several runs.
        name: name of the run.
        tokenizer: the tokenizer of the rows.
        config: a description of the run as JSON; values of other types, such as paths, are recorded as text.
        free: entries of ``config`` that may differ when the run is resumed.
        out: folder of the run, which may be moved; a run in another folder cannot begin again from epoch 1.

    Raises:
        FileExistsError: the folder holds something other than a recorded run, or another process records there.
        FileError: the history to resume is damaged.
        ValueError: the folder holds a history of a run with another configuration.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.algorithm_distillation.language import RunRecorder, read_run
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab"), Turn("c", reward=1.0)], terminated=True)], tokenizer, 10)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with RunRecorder(home, "ppo", tokenizer, config={"seed": 0}) as recorder:
        ...         recorder.record(1, rows)
        ...     record = read_run(f"{home}/run-ppo")[0]
        >>> record.query, record.response, record.response_tokens, record.reward, record.run, record.epoch
        ('ab', 'c', (2, 4), 1.0, 'ppo', 1)
    """

    def __init__(
        self,
        home: str | Path,
        name: str,
        tokenizer: Tokenizer,
        *,
        config: Mapping[str, Any],
        free: Sequence[str] = (),
        out: str | Path | None = None,
    ) -> None:
        if not name or Path(name).name != name:
            raise ValueError(f"The name of a run is one part of a path, got {name!r}.")
        self.folder, self.tokenizer = Path(home) / f"run-{name}", tokenizer
        self._name, self._config = name, json.loads(json.dumps(config, default=str))
        self._free, self._epochs = frozenset(free), tuple[str, ...]()
        self._out = "" if out is None else str(Path(out).resolve())
        self._recorded_out = self._out

    @property
    def epochs(self) -> int:
        """Number of epochs that were recorded."""
        return len(self._epochs)

    def __enter__(self) -> RunRecorder:
        with ExitStack() as stack:
            stack.enter_context(_files.folder_lock(self.folder, "records"))
            _files.remove_leftovers(self.folder)
            if (self.folder / _MANIFEST).is_file():
                self._continue()
            else:
                _files.refuse_content(self.folder)
                self._write()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _continue(self) -> None:
        before = _Run.read(self.folder / _MANIFEST, remedy=_REMEDY)
        keys = sorted((before.config.keys() | self._config.keys()) - self._free)
        if changed := [key for key in keys if before.config.get(key) != self._config.get(key)]:
            found = f"{self.folder} holds the history of a run with other {shorten(changed)}"
            raise ValueError(f"{found}: give another folder, or delete it.")
        self._config, self._epochs, self._recorded_out = before.config, before.epochs, before.out

    def _write(self) -> None:
        _Run(config=self._config, epochs=self._epochs, out=self._out).write(self.folder / _MANIFEST)
        self._recorded_out = self._out

    def rewind(self, epoch: int) -> None:
        """Delete all epochs after ``epoch``, which a resumed run plays again; 0 deletes all.

        Raises:
            ValueError: epochs up to ``epoch`` are missing, or all those of a run in another folder would be deleted.
        """
        if epoch > self.epochs:
            found = f"but {self.folder} has its history up to epoch {self.epochs} only"
            raise ValueError(f"The run continues after epoch {epoch}, {found}: train in another folder.")
        if not epoch and self._epochs and self._recorded_out != self._out:
            found = f"epochs 1 to {self.epochs} of the run in {self._recorded_out or 'another folder'}, which a new run"
            raise ValueError(f"{self.folder} has {found} would delete: give --out or --record-history another folder.")
        self._epochs = self._epochs[:epoch]
        self._write()
        kept = {_epoch_file(number) for number in range(1, epoch + 1)}
        for path in self.folder.glob("epoch-*.jsonl"):
            if path.name not in kept:
                path.unlink()

    def record(self, epoch: int, rows: TensorDictBase) -> None:
        """Append the episodes of an epoch.

        Args:
            epoch: number of the epoch, one more than the one before; the first is 1.
            rows: rows ``[N]``, one per episode, with the rewards of the environment; and, if they are known,
                ``token_log_prob`` ``[N, T]`` and the ``train_mask`` ``[N, T]`` of turns that another player took.

        Raises:
            ValueError: ``epoch`` does not continue those before. Nothing is written then.
        """
        if epoch != self.epochs + 1:
            raise ValueError(f"Epoch {self.epochs + 1} of {self.folder} is the next, got {epoch}: call rewind() first.")
        content = records.to_lines(run_records(rows, self.tokenizer, epoch=epoch, run=self._name)).encode()
        _files.write_file(self.folder / _epoch_file(epoch), content)
        self._epochs = (*self._epochs, hashlib.sha256(content).hexdigest())
        self._write()


def _epoch_file(number: int) -> str:
    return f"epoch-{number:06}.jsonl"


def read_run(folder: str | Path) -> list[TextRecord]:
    """The records of a run that :class:`RunRecorder` wrote, by epoch, episode and turn; see there for an example.

    Args:
        folder: the folder ``run-NAME``.

    Raises:
        FileError: there is no recorded run, or a file is missing, damaged, or was changed.
    """
    folder, found = Path(folder), list[TextRecord]()
    for number, digest in enumerate(_Run.read(folder / _MANIFEST, remedy=_REMEDY).epochs, start=1):
        path = _files.regular_file(folder / _epoch_file(number), _REMEDY)
        if _files.file_digest(path) != digest:
            raise FileError(path, f"differs from what {_MANIFEST} records", _REMEDY)
        found += records.read_text_records(path, remedy=_REMEDY)
    return found


def run_records(rows: TensorDictBase, tokenizer: Tokenizer, *, epoch: int, run: str) -> Iterator[TextRecord]:
    """The records of rows ``[N]``, by episode and turn; see :meth:`RunRecorder.record`.

    The query and response tokens of an episode's turns, one after the other, are its row up to its last response; what
    the environment wrote after it is not recorded.
    """
    rows = rows.cpu()
    log_probs, trained = rows.get(TOKEN_LOG_PROB, None), rows.get(TRAIN_MASK, None)
    trained = rows.get(AGENT_MASK) if trained is None else trained
    for number, row in enumerate(rows.unbind(0)):
        tokens, _, agent, rewards = (row.get(key).tolist() for key in ROW_KEYS)
        known = None if log_probs is None else log_probs[number].float().tolist()
        texts, before = _texts(row, tokenizer), 0
        spans = _responses(tokens, agent, tokenizer.control.end_of_action)
        for turn, ((first, end), (query, response)) in enumerate(zip(spans, texts, strict=True)):
            yield TextRecord(
                query=query,
                response=response,
                query_tokens=tuple(tokens[before:first]),
                response_tokens=tuple(tokens[first:end]),
                reward=records.shortest_decimal(sum(rewards[first:end])),
                log_probs=() if known is None or not trained[number, first] else tuple(known[first:end]),
                episode=number,
                turn=turn,
                epoch=epoch,
                run=run,
            )
            before = end


def _responses(tokens: list[int], agent: list[bool], end_of_action: int) -> list[tuple[int, int]]:
    """First position and end of each response: neighbours that the agent wrote, up to an end of its turn."""
    spans = list[tuple[int, int]]()
    for place, written in enumerate(agent):
        if written and spans and spans[-1][1] == place and tokens[place - 1] != end_of_action:
            spans[-1] = spans[-1][0], place + 1
        elif written:
            spans.append((place, place + 1))
    return spans


def _texts(row: TensorDictBase, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Query and response of each turn in which the agent wrote a token."""
    found, queries = list[tuple[str, str]](), list[str]()
    for turn in from_row(row, tokenizer).turns:
        if not turn.by_agent:
            queries.append(turn.text)
        elif turn.text or turn.closed or turn.tokens:
            found.append(("\n".join(queries), turn.text))
            queries = []
    return found
