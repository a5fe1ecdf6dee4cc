"""Episodes and datasets from dialogues in JSON Lines files, with an error for every mistake."""

from __future__ import annotations

import codecs
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.encoded_episode import EncodedEpisode, cut_episode, encode_episode, fits, stack_episodes
from torchrl_lang.data.episodes import Episode, Turn
from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import FileError, regular_file, shorten
from torchrl_lang.storage.readers import unique_keys

__all__ = ["BadLine", "dataset_from_jsonl", "parse_dialogue", "read_jsonl"]

T = TypeVar("T")

_BLOCK = 10_000
_SHOWN = 5
_REMEDY = "fix them, or leave them out with on_error='skip'"
_BY_AGENT = {"user": False, "environment": False, "assistant": True, "agent": True}


class BadLine(NamedTuple):
    """A line that holds no valid dialogue, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


def read_jsonl(
    path: str | os.PathLike[str], *, on_error: Literal["raise", "skip"] = "raise", ignore: Sequence[str] = ()
) -> tuple[list[Episode], list[BadLine]]:
    """Read a file of dialogues; see :func:`~torchrl_lang.data.parse_dialogue` for the format of a line.

    Empty lines are ignored.

    Args:
        path: the file, UTF-8, with or without a byte order mark.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.
        ignore: keys of the objects to ignore.

    Returns:
        The episodes and the skipped lines.

    Raises:
        FileError: the file is missing, holds no dialogue, or holds bad lines and ``on_error`` is "raise".
    """
    path, bad = Path(path), list[BadLine]()
    episodes = dict(_good_lines(path, on_error, bad, partial(parse_dialogue, ignore=ignore)))
    if not episodes:
        raise _no_dialogue(path)
    return list(episodes.values()), bad


def dataset_from_jsonl(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    ignore: Sequence[str] = (),
    overwrite: bool = False,
) -> RowDataset:
    """Make a dataset from a file of dialogues of any length.

    The manifest's ``notes`` list the skipped lines with reasons and the numbers of truncated lines; a warning gives
    their counts.

    Args:
        path: the file; see :func:`~torchrl_lang.data.parse_dialogue` for the format of a line.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        on_error: see :func:`read_jsonl`; a dialogue that cannot be encoded is a bad line, too.
        on_overflow: "error" treats a dialogue that does not fit as a bad line, "truncate" keeps its beginning (see
            :func:`~torchrl_lang.data.to_rows`).
        ignore: keys of the objects to ignore.
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    one_of("on_overflow", on_overflow, ("error", "truncate"))
    path, bad, truncated, block = Path(path), list[BadLine](), list[int](), list[EncodedEpisode]()

    def encode(line: str) -> EncodedEpisode:
        encoded = encode_episode(parse_dialogue(line, ignore=ignore), tokenizer)
        if on_overflow == "error" and not fits(encoded, row_length):
            raise ValueError(f"the dialogue has {len(encoded.tokens)} tokens, row_length is {row_length}")
        return encoded

    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {path.name}", overwrite=overwrite)
    with writer:
        for number, encoded in _good_lines(path, on_error, bad, encode):
            if not fits(encoded, row_length):
                truncated.append(number)
            block.append(cut_episode(encoded, row_length))
            if len(block) == _BLOCK:
                writer.extend(stack_episodes(block, tokenizer.control.pad, row_length))
                block.clear()
        if not writer.rows and not block:
            raise _no_dialogue(path)
        writer.extend(stack_episodes(block, tokenizer.control.pad, row_length))
        writer.notes = {"skipped": [line._asdict() for line in bad], "truncated_lines": truncated}
    if truncated:
        warnings.warn(
            f"{len(truncated)} dialogues of {path} are longer than row_length={row_length} tokens and were truncated; "
            f"the first is on line {truncated[0]}.",
            stacklevel=2,
        )
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def _good_lines(path: Path, on_error: str, bad: list[BadLine], convert: Callable[[str], T]) -> Iterator[tuple[int, T]]:
    """Number and value of each line that ``convert`` accepts; collects the others, and raises or warns at the end."""
    one_of("on_error", on_error, ("raise", "skip"))
    with regular_file(path, remedy="give the path of a text file with one JSON object per line").open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                value = convert(raw.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                bad.append(BadLine(number, _reason(error)))
                if on_error == "raise" and len(bad) == _SHOWN:
                    break
            else:
                yield number, value
    if not bad:
        return
    shown = "; ".join(f"line {line}: {reason}" for line, reason in bad[:_SHOWN])
    count = "1 bad line" if len(bad) == 1 else f"{len(bad)} bad lines"
    if on_error == "raise":
        least = "at least " * (len(bad) == _SHOWN)  # reading stopped here
        raise FileError(path, f"holds {least}{count} ({shown})", _REMEDY)
    more = "; ..." if len(bad) > _SHOWN else ""
    warnings.warn(f"{count} of {path} skipped ({shown}{more}).", stacklevel=3)


def _reason(error: ValueError | RecursionError) -> str:
    """Why a line is bad."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _no_dialogue(path: Path) -> FileError:
    return FileError(path, "holds no dialogue", "give a file with one JSON object per line")


# -- one line ----------------------------------------------------------------------------------------------------------


def parse_dialogue(line: str, *, ignore: Sequence[str] = ()) -> Episode:
    """Read one line of JSON as an episode.

    The line is an object with ``turns``, a list of objects with ``role`` ("user" or "environment", "assistant" or
    "agent"), ``text`` and, for the agent, ``reward`` (default 0). The line's own ``reward`` is added to the agent's
    last turn. ``truncated`` means that a limit ended the dialogue (default false), ``terminated`` that the task ended
    (default: true unless truncated).

    Args:
        line: one JSON object.
        ignore: keys of the object to ignore; any other unknown key is an error.

    Raises:
        ValueError: the line is malformed; the message gives the reason.

    Examples:
        >>> from torchrl_lang.data import parse_dialogue
        >>> line = '{"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}], "reward": 2}'
        >>> parse_dialogue(line)
        Episode(turns=(Turn(text='hi', ...), Turn(text='yo', reward=2.0, ...)), terminated=True, ...)
    """
    content = json.loads(line, object_pairs_hook=unique_keys)
    _check_keys(content, ("turns", "reward", "terminated", "truncated", *ignore), "the line")
    turns = content.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'turns' must be a list of at least one turn, got {_show(turns)}")
    parsed = [_turn(turn, f"turn {index}") for index, turn in enumerate(turns, start=1)]
    total = _number(content.get("reward", 0), "'reward'")
    if total:
        last = max((index for index, turn in enumerate(parsed) if turn.by_agent), default=None)
        if last is None:
            raise ValueError("'reward' is added to the agent's last turn, but there is no turn of the agent")
        parsed[last] = Turn(parsed[last].text, reward=(parsed[last].reward or 0.0) + total)
    truncated = _flag(content, "truncated", default=False)
    return Episode(parsed, _flag(content, "terminated", default=not truncated), truncated)


def _turn(turn: Any, where: str) -> Turn:
    _check_keys(turn, ("role", "text", "reward"), where)
    role, text = turn.get("role"), turn.get("text")
    if not isinstance(role, str) or role not in _BY_AGENT:
        raise ValueError(f"{where}: 'role' must be one of {list(_BY_AGENT)}, got {_show(role)}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: 'text' must be a string, got {_show(text)}")
    if _BY_AGENT[role]:
        return Turn(text, reward=_number(turn.get("reward", 0), f"{where}: 'reward'"))
    if "reward" in turn:
        raise ValueError(f"{where}: only turns of the agent may have a reward, this one has the role {role!r}")
    return Turn(text)


def _flag(content: dict[str, Any], key: str, *, default: bool) -> bool:
    flag = content.get(key, default)
    if not isinstance(flag, bool):
        raise ValueError(f"'{key}' must be true or false, got {_show(flag)}")
    return flag


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{what} must be a finite number, got {_show(value)}")
    return float(value)


def _check_keys(content: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, got {_show(content)}")
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown keys {shorten(unknown)}, the known ones are {list(known)}")


def _show(value: Any) -> str:
    """A value as JSON, shortened; only the beginning of a long text is converted."""
    text = json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
