"""Datasets on disk: rows as a memory-mapped TensorDict, written in blocks, with a tokenizer and a manifest."""

from __future__ import annotations

import hashlib
import json
import keyword
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import tensordict
import torch
from pydantic import Field, model_validator
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

import torchrl_lang
from torchrl_lang import _files, schema
from torchrl_lang._checks import checked
from torchrl_lang._files import FileError, Record, shorten
from torchrl_lang.functional import decision_mask
from torchrl_lang.text.episodes import Episode
from torchrl_lang.text.rows import from_row
from torchrl_lang.text.tokenizer_files import tokenizer_from_config
from torchrl_lang.text.tokenizers import Tokenizer, config_fingerprint, fingerprint

MANIFEST, TOKENIZER, ROWS, STAMP = "manifest.json", "tokenizer.json", "rows", ".verified.json"
META = f"{ROWS}/meta.json"
"""File that tensordict needs to open the rows without this library; this library does not read it."""

REMEDY = "the dataset is damaged, generate it again"

DISK_DTYPES = {
    schema.TOKENS: torch.int32,
    schema.ATTENTION_MASK: torch.bool,
    schema.AGENT_MASK: torch.bool,
    schema.TOKEN_REWARD: torch.float32,
    schema.TERMINATED: torch.bool,
    schema.TRUNCATED: torch.bool,
}
"""The entries that every dataset has, and their dtypes on disk."""

_DTYPES = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
_BLOCK_TOKENS = 1 << 22
"""Rows are checked in blocks of about this many tokens, because a dataset may be larger than memory."""
_SETTLED = 2_000_000_000
"""Nanoseconds after which a change certainly changes a file's time; some file systems have a resolution of 2 s."""

# -- the manifest ------------------------------------------------------------------------------------------------------

Size = Annotated[int, Field(ge=1, lt=2**40)]
Count = Annotated[int, Field(ge=0)]


Stored = tuple[torch.dtype, tuple[int, ...]]
"""The dtype of an entry on disk, and its shape in one row."""


class EntryRecord(Record):
    """How an entry is stored, and the checksum of its file."""

    dtype: Literal["bool", "int32", "int64", "float32"]
    shape: tuple[Size, ...]
    sha256: str

    @property
    def stored(self) -> Stored:
        """How the entry of one row is stored."""
        return _DTYPES[self.dtype], self.shape[1:]


class TokenizerRecord(Record):
    """Which tokenizer the rows have."""

    kind: str | None
    vocab_size: Size
    fingerprint: str


class Manifest(Record):
    """Description of a dataset: counts over its rows, its origin, and the checksums of its files."""

    FORMAT: ClassVar[str] = "torchrl_lang rows"
    VERSION: ClassVar[int] = 2

    episodes: Size
    tokens: Count
    decisions: Count
    terminated: Count
    truncated: Count
    mean_return: float
    row_length: Size
    seed: int | None
    source: str
    notes: dict[str, Any]
    tokenizer: TokenizerRecord
    entries: dict[str, EntryRecord]
    files: dict[str, str]
    created_by: dict[str, str]

    @model_validator(mode="after")
    def _check_entries(self) -> Manifest:
        every = row_entries(self.row_length)
        if missing := [*(every.keys() - self.entries.keys()), *({TOKENIZER, META} - self.files.keys())]:
            raise ValueError(f"does not describe {sorted(missing)}")
        for key, found in self.entries.items():
            known = every.get(key) or further_entry(key, *found.stored)
            if found.stored != known or found.shape[:1] != (self.episodes,):
                raise ValueError(f"does not describe {key!r} as {dtype_name(known[0])} {[self.episodes, *known[1]]}")
        return self

    def on_disk(self) -> dict[str, Stored]:
        """How each entry is stored."""
        return {key: entry.stored for key, entry in self.entries.items()}

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file."""
        return {entry_file(key): entry.sha256 for key, entry in self.entries.items()} | self.files


def row_entries(row_length: int) -> dict[str, Stored]:
    """The entries that every dataset has."""
    ends = (schema.TERMINATED, schema.TRUNCATED)
    return {key: (dtype, (1 if key in ends else row_length,)) for key, dtype in DISK_DTYPES.items()}


def further_entry(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
    """An entry beside those that every dataset has; raises ValueError if it cannot be stored."""
    is_name = key.isidentifier() and key.isascii() and not keyword.iskeyword(key)
    if not is_name or dtype not in (torch.bool, torch.int64, torch.float32):
        raise ValueError(f"{key!r}, {dtype}, cannot be stored: give bool, int64 or float32, named in ASCII letters.")
    return dtype, shape


def _stored(key: str, value: torch.Tensor) -> Stored:
    """How an entry of rows is stored."""
    shape = tuple(value.shape[1:])
    return (DISK_DTYPES[key], shape) if key in DISK_DTYPES else further_entry(key, value.dtype, shape)


def entry_file(key: str) -> str:
    """The file of an entry, relative to the dataset's folder."""
    return f"{ROWS}/{key}.memmap"


def map_rows(files: Mapping[str, Path], episodes: int, entries: Mapping[str, Stored]) -> TensorDict:
    """Map the entries' files, by :func:`entry_file`, to tensors; ``meta.json`` is not read."""
    mapped = {
        key: MemoryMappedTensor.from_filename(files[entry_file(key)], dtype, torch.Size([episodes, *shape]))
        for key, (dtype, shape) in entries.items()
    }
    return TensorDict(mapped, batch_size=[episodes])


def dtype_name(dtype: torch.dtype) -> Any:
    """Name of a dtype in the manifest."""
    return str(dtype).removeprefix("torch.")


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowDataset:
    """A dataset opened by :func:`load_dataset`. Indexing reads rows into memory.

    ``rows`` is the memory-mapped TensorDict, int32 ``tokens``, batch size ``[N]``, with the entries of a row,
    ``terminated``, ``truncated`` and those that the writer kept beside them. Writing to its tensors would change the
    files.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import RowDataset, write_dataset
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0)], terminated=True)] * 5, tokenizer, 8)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     dataset = write_dataset(home + "/data", rows, tokenizer)
        ...     isinstance(dataset, RowDataset), len(dataset), dataset[:2]["tokens"].shape
        (True, 5, torch.Size([2, 8]))
    """

    folder: Path
    rows: TensorDictBase
    tokenizer: Tokenizer
    manifest: Mapping[str, Any]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: Any) -> TensorDict:
        """Read rows into memory, with int64 ``tokens``."""
        picked = {key: value.clone() for key, value in self.rows[index].items()}
        picked[schema.TOKENS] = picked[schema.TOKENS].to(torch.int64)
        return TensorDict(picked, batch_size=picked[schema.TOKENS].shape[:-1])

    def episode(self, index: int) -> Episode:
        """Decode one row."""
        return from_row(self[index], self.tokenizer)


@checked
def load_dataset(
    folder: str | Path, *, tokenizer: Tokenizer | None = None, verify: Literal["once", True, False] = "once"
) -> RowDataset:
    """Open a dataset; its rows stay on disk until they are indexed.

    Loading always checks sizes, dtypes and shapes, and compares the manifest and the tokenizer with their digests.
    Verification reads all rows in blocks and checks their checksums, and that every row is well-formed (see
    :func:`~torchrl_lang.schema.check_row`).

    Args:
        folder: a folder that :class:`~torchrl_lang.data.DatasetWriter` or a function based on it wrote.
        tokenizer: if given, its fingerprint must match the dataset's tokenizer. Required for custom tokenizer classes.
        verify: ``"once"`` verifies the rows unless ``.verified.json`` records that they were verified and that no
            file's size, times or inode has changed since. True always verifies them, False never.

    Raises:
        FileNotFoundError: there is no dataset, or writing it was interrupted.
        FileError: the dataset is damaged, was changed, or has another version.
        ValueError: the dataset has another tokenizer, or a custom one and ``tokenizer`` is missing.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import load_dataset, write_dataset
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0), Turn("c")], terminated=True)], tokenizer, 12)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = write_dataset(home + "/data", rows, tokenizer)
        ...     dataset = load_dataset(home + "/data")
        ...     dataset.episode(0).turns[1].text, dataset.manifest["mean_return"]
        ('c', 1.0)
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        reason = f"{MANIFEST} is missing" if folder.exists() else "that folder does not exist"
        reason += ", because writing was interrupted or is still in progress" * _files.is_unfinished(folder)
        raise FileNotFoundError(f"There is no dataset in {folder}: {reason}. Generate it again.")
    manifest = Manifest.read(folder / MANIFEST, remedy=REMEDY)
    tokenizer = _tokenizer(folder, manifest.tokenizer, tokenizer)
    files = _file_paths(folder, manifest)
    if verify:
        path, (stamp, is_settled) = folder / STAMP, _stamp(folder, [folder / MANIFEST, *files.values()])
        known = None
        with suppress(OSError):  # a stamp that cannot be read is none
            known = path.read_bytes() if path.is_file() else None
        if verify != "once" or known != stamp:
            _verify(folder, files, manifest, tokenizer.vocab_size)
            with suppress(OSError):  # in a read-only folder the files are verified each time
                if is_settled:
                    _files.write_file(path, stamp)
    rows = map_rows(files, manifest.episodes, manifest.on_disk()).lock_()
    return RowDataset(folder, rows, tokenizer, manifest.model_dump())


def _tokenizer(folder: Path, written_with: TokenizerRecord, given: Tokenizer | None) -> Tokenizer:
    """The tokenizer of the dataset."""
    path, found = folder / TOKENIZER, written_with.fingerprint
    config = _files.read_json(path, remedy=REMEDY)
    if config_fingerprint(config) != found:
        raise FileError(path, f"was changed: the manifest records its fingerprint as {shorten(found)}", REMEDY)
    if given is None:
        return tokenizer_from_config(config)
    if fingerprint(given) != found:
        raise ValueError(f"The dataset in {folder} has another tokenizer, so its ids mean other text: use its own.")
    return given


def _file_paths(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """The paths of all files with a checksum in the manifest, by name; checks that they are there, and their sizes."""
    paths = {name: _files.file_in(folder, name, remedy=REMEDY) for name in manifest.digests()}
    on_disk = manifest.on_disk().items()
    sizes = {entry_file(key): dtype.itemsize * math.prod(shape) * manifest.episodes for key, (dtype, shape) in on_disk}
    for name, path in paths.items():
        size = _files.regular_file(path, REMEDY).stat().st_size
        if size != sizes.get(name, size):
            raise FileError(path, f"has {size} bytes, expected {sizes[name]}", REMEDY)
    return paths


def _verify(folder: Path, files: Mapping[str, Path], manifest: Manifest, vocab_size: int) -> None:
    """Check the checksums of all files and every row; raises FileError."""
    for name, digest in manifest.digests().items():
        if _files.file_digest(files[name]) != digest:
            raise FileError(files[name], "was changed after it was written: its checksum differs", REMEDY)
    # A separate mapping, so that the pages read are released from memory afterwards.
    rows, first = map_rows(files, manifest.episodes, entries := manifest.on_disk()), 0
    bools = [key for key, (dtype, _) in entries.items() if dtype == torch.bool]
    for block in rows.split(max(1, _BLOCK_TOKENS // manifest.row_length)):
        with _files.file_errors(folder / ROWS, "holds a bad row", REMEDY, ValueError):
            if odd := [key for key in bools if int(block.get(key).view(torch.uint8).amax()) > 1]:
                raise ValueError(f"{entry_file(odd[0])} holds bytes other than 0 and 1")
            _check_block(block, vocab_size, first)
        first += len(block)


def _check_block(rows: TensorDictBase, vocab_size: int, first: int) -> None:
    """Check the values of rows ``[M]``, the first of which is row ``first`` of a dataset."""
    tokens = rows.get(schema.TOKENS)
    rule = f"the id {{token}} at position {{position}}: ids, also those of padding, lie in [0, {vocab_size})"
    try:
        schema.check_row(rows)
        schema.refuse(tokens, [((tokens < 0) | (tokens >= vocab_size), rule)], tokens)
    except ValueError as error:
        raise ValueError(f"Rows from number {first}: {error}" if first else str(error)) from error


def _stamp(folder: Path, files: Sequence[Path]) -> tuple[bytes, bool]:
    """The size, times and inode of each file as JSON, read before they are verified, and whether these may be stored.

    Writing, replacing or copying a file changes one of these numbers (programs cannot set the time of change), so they
    no longer match and the files are verified again. This saves reading unchanged files; it does not protect against
    malicious changes.
    """
    states = {str(path.relative_to(folder)): path.stat() for path in files}
    numbers = {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in states.items()}
    is_settled = all(time.time_ns() - each.st_ctime_ns > _SETTLED for each in states.values())
    return json.dumps(numbers).encode(), is_settled


# -- writing -----------------------------------------------------------------------------------------------------------


class DatasetWriter:
    """Context manager that writes a dataset of any size in blocks.

    The files are written to a temporary folder beside ``folder``. It is renamed to ``folder`` when the ``with`` block
    succeeds and deleted when it fails. The next writer of the same folder deletes what a killed process left.

    Args:
        folder: the folder to create.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        seed: the seed of the data, recorded in the manifest.
        source: a description of the behaviour policy and environment, recorded in the manifest.
        overwrite: replace an existing dataset.
        keep: names of further entries to write, bool, int64 or float32 ``[N, ...]``, such as a number of each row's
            kind. Features, ``features`` and ``features_mask``, are always kept.

    Attributes:
        notes: further JSON content for the manifest.

    Raises:
        FileExistsError: ``folder`` exists and ``overwrite`` is False, ``folder`` holds something other than a dataset,
            or another process is writing it.
        KeyError: rows lack an entry.
        ValueError: no rows were written, or rows do not fit the schema or ``row_length``.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import DatasetWriter, load_dataset
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0)], terminated=True)], tokenizer, 8)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with DatasetWriter(home + "/data", tokenizer, 8, source="an example") as writer:
        ...         for block in range(3):
        ...             writer.extend(rows)
        ...     len(load_dataset(home + "/data"))
        3
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: Tokenizer,
        row_length: int,
        *,
        seed: int | None = None,
        source: str = "",
        overwrite: bool = False,
        keep: Sequence[str] = (),
    ) -> None:
        self.folder, self.tokenizer, self.row_length = Path(folder), tokenizer, row_length
        self.seed, self.source, self.overwrite = seed, source, overwrite
        self.keep = tuple(key for key in dict.fromkeys(keep) if key not in DISK_DTYPES)
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> DatasetWriter:
        self._writing = self._written()
        self._writing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writing.__exit__(*error)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Open the files; complete the dataset when the block succeeds."""
        with _files.write_folder(self.folder) as partial:
            # Under the writer's lock, so that no other process completes this dataset meanwhile.
            if self.folder.exists() and not self.overwrite:
                raise FileExistsError(f"{self.folder} exists: give another folder, or overwrite=True (--overwrite).")
            if not (self.folder / MANIFEST).exists():
                _files.refuse_content(self.folder)
            (partial / ROWS).mkdir()
            self._sums, self._reward = Counter[str](), 0.0
            self._entries: dict[str, Stored] = {}
            self._hashes: dict[str, Any] = {}
            self._files: dict[str, BinaryIO] = {}
            with ExitStack() as files:
                self._partial, self._open_files = partial, files
                yield
            self._finish(partial)

    def extend(self, rows: TensorDictBase) -> None:
        """Append rows ``[M]`` with the entries of a row, ``terminated``, ``truncated`` and those of ``keep``.

        Features are kept, too, if the first rows have some. Other entries are dropped.

        Raises:
            KeyError, TypeError, ValueError: the rows lack an entry, or do not fit the schema, the tokenizer,
                ``row_length`` or the rows before. No row of the call is written then.
        """
        features = [key for key in (schema.FEATURES, schema.FEATURES_MASK) if rows.get(key, None) is not None]
        keys = dict.fromkeys([*DISK_DTYPES, *self.keep, *features])
        found = {key: _stored(key, schema.entry(rows, key)) for key in keys}
        entries = self._entries or found | row_entries(self.row_length)
        if found != entries:
            raise ValueError(f"These rows have the entries {found}, but this dataset {entries}: give all the same.")
        if rows.shape[0] == 0:
            return
        _check_block(rows, self.tokenizer.vocab_size, first=self.rows)
        if not self.rows:  # open the files of the entries
            self._entries = entries
            self._hashes = {key: hashlib.sha256() for key in entries}
            paths = {key: self._partial / entry_file(key) for key in entries}
            self._files = {key: self._open_files.enter_context(path.open("wb")) for key, path in paths.items()}
        for key, (dtype, _) in entries.items():
            block = rows.get(key).detach().to("cpu", dtype).contiguous().numpy()
            data = memoryview(block).cast("B")
            self._files[key].write(data)
            self._hashes[key].update(data)
        self._sums += Counter(
            episodes=len(rows),
            tokens=int(rows.get(schema.ATTENTION_MASK).sum()),
            decisions=int(decision_mask(rows.get(schema.AGENT_MASK)).sum()),
            terminated=int(rows.get(schema.TERMINATED).sum()),
            truncated=int(rows.get(schema.TRUNCATED).sum()),
        )
        self._reward += float(rows.get(schema.TOKEN_REWARD).sum(dtype=torch.float64))

    @property
    def rows(self) -> int:
        """Number of rows written."""
        return self._sums["episodes"]

    def _finish(self, partial: Path) -> None:
        if not (episodes := self.rows):
            raise ValueError(f"No episode was written to {self.folder}: a dataset needs at least one.")
        # The data is written already: this adds the meta.json that tensordict needs.
        files = {name: partial / name for name in map(entry_file, self._entries)}
        map_rows(files, episodes, self._entries).memmap_(partial / ROWS)
        config, vocab_size = self.tokenizer.config(), self.tokenizer.vocab_size
        _files.write_json(partial / TOKENIZER, config)
        digests = {key: found.hexdigest() for key, found in self._hashes.items()}
        kind: Any = {"kind": config.get("kind"), "vocab_size": vocab_size}
        versions = {"torchrl_lang": torchrl_lang.__version__, "tensordict": tensordict.__version__}
        Manifest(
            **{name: self._sums[name] for name in ("episodes", "tokens", "decisions", "terminated", "truncated")},
            mean_return=self._reward / episodes,
            row_length=self.row_length,
            seed=self.seed,
            source=self.source,
            notes=self.notes,
            tokenizer=TokenizerRecord(**kind, fingerprint=fingerprint(self.tokenizer)),
            entries={
                key: EntryRecord(dtype=dtype_name(dtype), shape=(episodes, *shape), sha256=digests[key])
                for key, (dtype, shape) in self._entries.items()
            },
            files={name: _files.file_digest(partial / name) for name in (TOKENIZER, META)},
            created_by={**versions, "torch": str(torch.__version__)},
        ).write(partial / MANIFEST)


def write_dataset(
    folder: str | Path,
    rows: TensorDictBase,
    tokenizer: Tokenizer,
    *,
    seed: int | None = None,
    source: str = "",
    overwrite: bool = False,
    keep: Sequence[str] = (),
    notes: Mapping[str, Any] | None = None,
) -> RowDataset:
    """Write rows ``[N, T]`` as a dataset and open it; see :class:`DatasetWriter` for the arguments."""
    width = schema.entry(rows, schema.TOKENS).shape[-1]
    options: dict[str, Any] = {"seed": seed, "source": source, "overwrite": overwrite, "keep": keep}
    with DatasetWriter(folder, tokenizer, width, **options) as writer:
        writer.notes = dict(notes or {})
        writer.extend(rows)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)  # extend() checked each block
