"""Read logs of PPO runs that the fork of trlx behind Algorithm-Distillation-RLHF wrote.

A folder holds ``run-<id>/config.json`` and one ``run-<id>/epoch-<time>.json`` for each epoch: a list of objects with
``query_tensor``, ``response_tensor``, ``rewards``, ``logprobs`` and ``values``, one number a token. The repository's
command that decodes adds ``query_text`` and ``response_text``. Rewards include the KL penalty, and the last one the
score of the whole text. A ``response_tensor`` is padded to the longest completion of its batch, the others are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_lang._files import FileError, read_json, read_json_list
from torchrl_lang.algorithm_distillation.language.text_history import TextHistory, read_record

__all__ = ["RunLogs", "read_run_logs"]

_REMEDY = "log the run again, or remove it"
_CONFIG = "config.json"
_NUMBER = re.compile(r"\d+(\.\d+)?$")
_FIELDS = {"rewards": "rewards", "logprobs": "log_probs", "query_tensor": "query_tokens"}
_FIELDS |= {"response_tensor": "response_tokens", "query_text": "query", "response_text": "response"}


class RunLogs(NamedTuple):
    """The logs of some runs."""

    records: list[TextHistory]
    """By run and epoch."""
    configs: dict[str, dict[str, Any]]
    """The configuration of each run by its name."""


def read_run_logs(folder: str | os.PathLike[str], decode: Callable[[Sequence[int]], str] | None = None) -> RunLogs:
    """Read the logs of all runs of a folder.

    Epochs are sorted by the number at the end of the file's name, as a number (``epoch-9`` before ``epoch-10``), and
    counted from 0.

    Args:
        folder: holds the folders ``run-*``.
        decode: text of ids, for logs without texts, such as ``lambda ids: tokenizer.decode(ids,
            skip_special_tokens=True)``.

    Raises:
        FileNotFoundError: there is no run.
        FileError: a file is missing or damaged, has no number in its name, or has no texts and ``decode`` is None.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.algorithm_distillation.language import read_run_logs
        >>> with tempfile.TemporaryDirectory() as home:
        ...     run = pathlib.Path(home) / "run-1f"
        ...     run.mkdir()
        ...     _ = (run / "config.json").write_text("{}")
        ...     for number in (10, 9):
        ...         one = {"query_text": "q", "response_text": f"r{number}", "rewards": [0.5], "logprobs": [-1.0]}
        ...         _ = (run / f"epoch-{number}.json").write_text(json.dumps([one]))
        ...     [(record.response, record.epoch) for record in read_run_logs(home).records]
        [('r9', 0), ('r10', 1)]
    """
    runs = sorted(path for path in Path(folder).glob("run-*") if path.is_dir())
    if not runs:
        raise FileNotFoundError(f"There is no folder run-* in {folder}: give the folder of the runs.")
    records, configs = list[TextHistory](), {}
    for run in runs:
        configs[run.name] = read_json(run / _CONFIG, remedy=_REMEDY)
        epochs = sorted((path for path in run.glob("*.json") if path.name != _CONFIG), key=_epoch_number)
        for epoch, path in enumerate(epochs):
            for place, content in enumerate(read_json_list(path, remedy=_REMEDY)):
                try:
                    records.append(_record(content, epoch, run.name, decode))
                except ValueError as error:
                    raise FileError(path, f"holds a bad rollout {place} ({error})", _REMEDY) from error
    return RunLogs(records, configs)


def _epoch_number(path: Path) -> Decimal:
    match = _NUMBER.search(path.stem)
    if match is None:
        raise FileError(path, "has no number at the end of its name, which orders the epochs", "rename it")
    return Decimal(match.group())


def _record(content: Any, epoch: int, run: str, decode: Callable[[Sequence[int]], str] | None) -> TextHistory:
    """The record of a rollout; other fields than those of ``_FIELDS``, such as ``values``, are ignored."""
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not a JSON object")
    found = {name: content[key] for key, name in _FIELDS.items() if key in content}
    _remove_padding(found)
    for text, tokens in (("query", "query_tokens"), ("response", "response_tokens")):
        if text not in found and tokens in found:
            if decode is None:
                raise ValueError(f"it has no {text}_text: decode the logs first, or pass decode=")
            found[text] = decode(found[tokens])
    return read_record({**found, "epoch": epoch, "run": run})


def _remove_padding(found: dict[str, Any]) -> None:
    """Cut tokens of a response after those with a log-probability and a reward, where they repeat one token."""
    tokens, log_probs, rewards = (found.get(name) for name in ("response_tokens", "log_probs", "rewards"))
    if not (isinstance(tokens, list) and isinstance(log_probs, list) and isinstance(rewards, list)):
        return
    real, padding = tokens[: len(log_probs)], tokens[len(log_probs) :]
    if real and len(rewards) == len(real) and all(token == padding[0] for token in padding):
        found["response_tokens"] = real
