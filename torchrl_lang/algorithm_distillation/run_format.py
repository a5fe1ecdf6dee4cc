"""The files of a recorded run: its records as JSON Lines, one file per epoch, and their manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrl_lang._files import (
    Fields,
    FileError,
    file_digest,
    json_digest,
    read_json,
    read_manifest,
    regular_file,
    write_manifest,
)
from torchrl_lang.data.jsonl import LineFile, parse_object
from torchrl_lang.text.json_checks import check_keys

__all__ = [
    "CONFIG",
    "MANIFEST",
    "REMEDY",
    "Epoch",
    "RunManifest",
    "RunRecord",
    "epoch_file",
    "lines_of",
    "read_epoch",
    "read_run_manifest",
    "shortest_decimal",
    "write_run_manifest",
]

FORMAT, VERSION = "torchrl_lang run history", 1
CONFIG, MANIFEST = "config.json", "manifest.json"
REMEDY = "the history of the run is damaged, restore the file or record the run again"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One turn of a language model in one episode of a training run.

    Args:
        query: what the environment wrote since the model's last response, as text without control tokens.
        response: what the model wrote, without the token that ends its turn.
        query_tokens: the tokens of ``query``, with control tokens.
        response_tokens: the tokens that the model wrote, the end of its turn included.
        reward: what the environment paid for the response, without a penalty on divergence.
        log_probs: log-probability of each response token under the model that wrote it; empty if unknown.
        episode: number of the episode in its epoch, from 0.
        turn: number of the response in its episode, from 0.
        epoch: number of the epoch, from 1: an epoch is an iteration of training, played with the same weights.
        run: name of the run.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import RunRecord
        >>> RunRecord(query="ab", response="c", query_tokens=(7, 0, 1, 6), response_tokens=(2, 4), reward=1.0,
        ...           log_probs=(-0.5, -0.1), episode=0, turn=0, epoch=1, run="ppo").response
        'c'
    """

    query: str
    response: str
    query_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    reward: float
    log_probs: tuple[float, ...]
    episode: int
    turn: int
    epoch: int
    run: str


_IN_FILE = tuple(field.name for field in fields(RunRecord) if field.name not in ("epoch", "run"))
"""The fields of a line; the others are in the names of the file and the folder."""


class Epoch(NamedTuple):
    """An epoch in the manifest."""

    records: int
    sha256: str


def epoch_file(epoch: int) -> str:
    """The name of the file of an epoch.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.run_format import epoch_file
        >>> epoch_file(12)
        'epoch-000012.jsonl'
    """
    return f"epoch-{epoch:06d}.jsonl"


def lines_of(records: Sequence[RunRecord]) -> str:
    """The content of the file of an epoch, without epoch and run."""
    content = ({name: value for name, value in asdict(each).items() if name in _IN_FILE} for each in records)
    return "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in content)


class RunManifest(NamedTuple):
    """What is recorded of a run."""

    config: dict[str, Any]
    epochs: list[Epoch]
    """From 1."""
    out: str
    """Absolute path of the folder of the run that recorded last; empty if it is unknown."""


def write_run_manifest(folder: Path, run: RunManifest) -> None:
    """Write the manifest of a run; its configuration has a file of its own."""
    listed = [epoch._asdict() for epoch in run.epochs]
    content = {"format": FORMAT, "version": VERSION, "config_sha256": json_digest(run.config), "epochs": listed}
    write_manifest(folder / MANIFEST, content | {"out": run.out})


def read_run_manifest(folder: Path) -> RunManifest:
    """The manifest of a run, and its configuration.

    Raises:
        FileNotFoundError: there is no recorded run.
        FileError: the manifest or the configuration is damaged, was changed, or has a later version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"There is no recorded run in {folder}: {MANIFEST} is missing. Record one first.")
    manifest = read_manifest(path, remedy=REMEDY, version=VERSION, kind=FORMAT)
    config = read_json(folder / CONFIG, remedy=REMEDY)
    if json_digest(config) != manifest.take("config_sha256", str):
        raise FileError(folder / CONFIG, f"differs from what {MANIFEST} records", REMEDY)
    listed = [Fields(each, path, REMEDY, "epochs") for each in manifest.list_of("epochs", dict)]
    epochs = [Epoch(each.at_least("records", 0), each.take("sha256", str)) for each in listed]
    return RunManifest(config, epochs, manifest.take("out", str, ""))


def read_epoch(folder: Path, number: int, expected: Epoch) -> list[RunRecord]:
    """The records of an epoch.

    Raises:
        FileError: the file is missing, differs from what the manifest records, or holds a bad record.
    """
    path = regular_file(folder / epoch_file(number), REMEDY)
    if file_digest(path) != expected.sha256:
        raise FileError(path, f"differs from what {MANIFEST} records", REMEDY)
    records, run = list[RunRecord](), folder.resolve().name.removeprefix("run-")
    for line, text in LineFile(path):
        try:
            records.append(_record(parse_object(text.decode()), path, number, run))
        except FileError:
            raise
        except (ValueError, RecursionError) as error:
            raise FileError(path, f"holds no record on line {line} ({error})", REMEDY) from error
    if len(records) != expected.records:
        raise FileError(path, f"has {len(records)} records, {MANIFEST} lists {expected.records}", REMEDY)
    return records


def _record(content: Any, path: Path, epoch: int, run: str) -> RunRecord:
    check_keys(content, _IN_FILE, "the record")
    line = Fields(content, path, REMEDY)
    record = RunRecord(
        query=line.take("query", str),
        response=line.take("response", str),
        query_tokens=tuple(line.list_of("query_tokens", int)),
        response_tokens=tuple(line.list_of("response_tokens", int)),
        reward=line.take("reward", float),
        log_probs=tuple(line.list_of("log_probs", float)),
        episode=line.at_least("episode", 0),
        turn=line.at_least("turn", 0),
        epoch=epoch,
        run=run,
    )
    if record.log_probs and len(record.log_probs) != len(record.response_tokens):
        raise ValueError(f"{len(record.log_probs)} log_probs of {len(record.response_tokens)} response_tokens")
    return record


def shortest_decimal(reward: float) -> float:
    """The number with the fewest digits that is the same float32: rows have -0.1 as -0.10000000149011612.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.run_format import shortest_decimal
        >>> shortest_decimal(0.1 + 0.2)
        0.3
    """
    return float(str(np.float32(reward)))
