"""Learning histories of text tasks: who was asked what, what was answered and earned, in which epoch of which run."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torchrl_lang._files import shorten, write_file
from torchrl_lang.data.jsonl import BadLine, LineFile, good_items, parse_object
from torchrl_lang.text.json_checks import check_keys, read_number, show

__all__ = ["TextHistory", "group_episodes", "in_epoch_order", "read_text_history", "write_text_history"]


@dataclass(frozen=True, kw_only=True)
class TextHistory:
    """One prompt and completion of a training run, with what the completion earned.

    Args:
        query: the prompt.
        response: the completion.
        rewards: the reward of each token of the completion, penalties included, or of the whole one; at least one.
        log_probs: log-probability of each token of the completion under the learner, if known.
        epoch: number of the epoch in its run, from 0.
        run: name of the run.
        query_tokens: the ids of the prompt, if known.
        response_tokens: the ids of the completion, if known.
        episode: number of the episode in its epoch, from 0, for episodes of several records; None if the record is an
            episode.

    Raises:
        ValueError: there is no reward, a number is not finite, the epoch or the episode is negative, or there are other
            numbers of log-probabilities than tokens.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory
        >>> TextHistory(query="The film was", response="wonderful", rewards=(-0.01, 0.93), epoch=3, run="run-a").reward
        0.93
    """

    query: str
    response: str
    rewards: tuple[float, ...]
    log_probs: tuple[float, ...] = ()
    epoch: int = 0
    run: str = ""
    query_tokens: tuple[int, ...] = ()
    response_tokens: tuple[int, ...] = ()
    episode: int | None = None

    def __post_init__(self) -> None:
        for name in ("rewards", "log_probs"):
            numbers = tuple(read_number(value, f"each of '{name}'") for value in getattr(self, name))
            object.__setattr__(self, name, numbers)
        if not self.rewards or self.epoch < 0 or (self.episode or 0) < 0:
            raise ValueError(
                f"A text history has at least one reward, an epoch and an episode from 0, got {len(self.rewards)} "
                f"rewards, epoch={self.epoch} and episode={self.episode}."
            )
        if self.log_probs and self.response_tokens and len(self.log_probs) != len(self.response_tokens):
            raise ValueError(
                f"A text history has one of log_probs for each of response_tokens, got {len(self.log_probs)} for "
                f"{len(self.response_tokens)}."
            )

    @property
    def reward(self) -> float:
        """The last reward: that of the whole completion, and of its last token."""
        return self.rewards[-1]


def in_epoch_order(records: Sequence[TextHistory]) -> list[list[TextHistory]]:
    """The records of each run by epoch, as they were given within an epoch; runs by name.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, in_epoch_order
        >>> records = [TextHistory(query="", response=name, rewards=(0,), epoch=n) for name, n in [("b", 1), ("a", 0)]]
        >>> [[record.response for record in run] for run in in_epoch_order(records)]
        [['a', 'b']]
    """
    runs = sorted({record.run for record in records})
    return [sorted((each for each in records if each.run == run), key=lambda each: each.epoch) for run in runs]


def group_episodes(records: Sequence[TextHistory]) -> list[list[TextHistory]]:
    """The records of each run, epoch and episode, in the order of their first ones; those of others may be between.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, group_episodes
        >>> turns = [("a", 0), ("b", 1), ("c", 0)]
        >>> records = [TextHistory(query="", response=text, rewards=(0,), episode=number) for text, number in turns]
        >>> [[record.response for record in episode] for episode in group_episodes(records)]
        [['a', 'c'], ['b']]
    """
    found: dict[Hashable, list[TextHistory]] = {}
    for number, record in enumerate(records):
        key = number if record.episode is None else (record.run, record.epoch, record.episode)
        found.setdefault(key, []).append(record)
    return list(found.values())


def write_text_history(path: str | os.PathLike[str], records: Sequence[TextHistory]) -> None:
    """Write records to a JSON Lines file, one a line.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, read_text_history, write_text_history
        >>> record = TextHistory(query="The film was", response="wonderful", rewards=(0.93,), epoch=3)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     write_text_history(f"{home}/history.jsonl", [record])
        ...     read_text_history(f"{home}/history.jsonl") == ([record], [])
        True
    """
    lines = (json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) for record in records)
    write_file(Path(path), "".join(f"{line}\n" for line in lines))


def read_text_history(
    path: str | os.PathLike[str], *, on_error: Literal["raise", "skip"] = "raise"
) -> tuple[list[TextHistory], list[BadLine]]:
    """Read the records of a file of :func:`write_text_history`, and which lines were skipped.

    Args:
        path: the file.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.

    Raises:
        FileError: the file is missing, holds no record, or holds bad lines and ``on_error`` is "raise".

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, read_text_history, write_text_history
        >>> with tempfile.TemporaryDirectory() as home:
        ...     write_text_history(f"{home}/history.jsonl", [TextHistory(query="a", response="b", rewards=(1,))])
        ...     records, bad = read_text_history(f"{home}/history.jsonl")
        >>> records[0].response, bad
        ('b', [])
    """
    source, bad = LineFile(Path(path)), list[BadLine]()
    records = [record for _, record in good_items(source, lambda line: read_record(parse_object(line)), on_error, bad)]
    if not records:
        raise source.error("holds no record", source.no_dialogue)
    return records, bad


def read_record(content: Any) -> TextHistory:
    """A record from its JSON object; raises ValueError if it is not one."""
    names = [each.name for each in fields(TextHistory)]
    check_keys(content, names, "a record")
    values: dict[str, Any] = {}
    for name in ("query", "response", "run"):
        values[name] = _typed(content, name, str, "" if name == "run" else None)
    values["epoch"] = _typed(content, "epoch", int, 0)
    values["episode"] = None if content.get("episode") is None else _typed(content, "episode", int)
    for name in ("rewards", "log_probs", "query_tokens", "response_tokens"):
        items = _typed(content, name, list, None if name == "rewards" else [])
        if name.endswith("tokens") and not all(type(item) is int and item >= 0 for item in items):
            raise ValueError(f"'{name}' must be a list of ids, got {shorten(items)}")
        values[name] = tuple(items)
    return TextHistory(**values)


def _typed(content: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A value of a type; ``default`` if it is missing and there is one."""
    value = content.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"'{key}' must be of type {kind.__name__}, got {show(value)}")
    return value
