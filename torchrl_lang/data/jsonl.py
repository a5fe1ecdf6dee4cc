"""Datasets from dialogues in JSON Lines files or any other records, with an error for every mistake."""

from __future__ import annotations

import codecs
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torchrl_lang._checks import one_of
from torchrl_lang._files import FileError, regular_file, shorten, unique_keys
from torchrl_lang.data.dataset import DatasetWriter, RowDataset, load_dataset
from torchrl_lang.text.chat_template import Message
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.json_checks import check_keys, read_flag, read_number, show
from torchrl_lang.text.messages import from_messages
from torchrl_lang.text.rows import EncodedEpisode, cut_episode, encode_episode, fits, stack_episodes
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = [
    "BadLine",
    "DialogueReader",
    "LineFile",
    "Records",
    "RewardOfMessages",
    "dataset_from_jsonl",
    "dataset_from_records",
    "good_items",
    "parse_dialogue",
    "read_jsonl",
]


RewardOfMessages = Callable[[list[Message]], float | Sequence[float]]
"""Maps the messages of a conversation to its reward, or to one reward for each message of the assistant."""

_BY_AGENT = {"user": False, "environment": False, "assistant": True, "agent": True}
_FLAGS = ("terminated", "truncated")


@dataclass(frozen=True, kw_only=True)
class DialogueReader:
    """Reads records of dialogues as episodes.

    A record is a mapping, such as a line of a JSONL file or a row of a Hugging Face dataset, with one of

    - ``turns``: objects with ``role`` ("user" or "environment", "assistant" or "agent"), ``text`` and, for the agent,
      ``reward`` (default 0);
    - ``messages``: see :func:`~torchrl_lang.text.from_messages`;
    - ``prompt`` and ``completion``, as TRL has them: two texts, or two lists of messages;
    - ``chosen`` and ``rejected``, with or without a ``prompt``: two episodes.

    ``truncated`` means that a limit ended the dialogue (default false), ``terminated`` that the task ended (default:
    true unless truncated).

    Args:
        reward: where rewards come from, beside those of single turns and messages. By default the record's ``reward``,
            if it has one; or the name of another entry, or a function of the messages. A number is added to the agent's
            last turn, and so is a truth value of a named entry, as 0 or 1; a list, beside messages or a completion, has
            one number for each turn of the agent.
        preference_rewards: rewards of chosen and rejected completions.
        ignore: entries of the record to ignore; any other unknown entry is an error.

    Examples:
        >>> from torchrl_lang.data import DialogueReader
        >>> read = DialogueReader(reward="score")
        >>> read({"prompt": "2 + 2", "completion": "4", "score": 1})
        [Episode(turns=(Turn(text='2 + 2', ...), Turn(text='4', reward=1.0, ...)), terminated=True, ...)]
        >>> chosen, rejected = read({"prompt": "2 + 2", "chosen": "4", "rejected": "5"})
        >>> chosen.total_reward, rejected.total_reward
        (1.0, 0.0)
    """

    reward: str | RewardOfMessages | None = None
    preference_rewards: tuple[float, float] = (1.0, 0.0)
    ignore: Sequence[str] = ()

    def __call__(self, record: Any, tokenizer: Tokenizer | None = None) -> list[Episode]:
        """The episodes of a record.

        Args:
            record: a mapping as above.
            tokenizer: that of the rows; needed for calls of tools.

        Raises:
            ValueError: the record is malformed; the message gives the reason.
        """
        forms = {
            "turns": ("turns",),
            "messages": ("messages",),
            "completion": ("prompt", "completion"),
            "chosen": ("prompt", "chosen", "rejected"),
        }
        name = self.reward if isinstance(self.reward, str) else "reward"
        if not isinstance(record, Mapping):
            raise ValueError(f"a dialogue must be a JSON object, got {show(record)}")
        form = next((form for form in forms if record.get(form) is not None), None)
        if form is None:
            raise ValueError(f"a dialogue must have one of the entries {list(forms)}, got {show(record)}")
        if form != "turns":
            record = {key: value for key, value in record.items() if value is not None}  # tables fill gaps with None
        rewards = () if form == "chosen" else (name,)  # preferences have rewards of their own
        check_keys(record, (*forms[form], *rewards, *_FLAGS, *self.ignore), "the dialogue")
        truncated = read_flag(record, "truncated", default=False)
        ends = {"terminated": read_flag(record, "terminated", default=not truncated), "truncated": truncated}
        if form == "turns":
            return [self._rewarded(Episode(_turns(record["turns"]), **ends), record, name, None)]
        if form == "messages":
            return [self._episode(_messages(record, "messages"), record, name, tokenizer, ends)]
        prompt = _messages(record, "prompt", role="user") if "prompt" in record else []
        if form == "completion":
            messages = [*prompt, *_messages(record, "completion", role="assistant")]
            return [self._episode(messages, record, name, tokenizer, ends)]
        both = [[*prompt, *_messages(record, key, role="assistant")] for key in ("chosen", "rejected")]
        episodes = [from_messages(messages, tokenizer, **ends) for messages in both]
        return [_add_reward(e, r) for e, r in zip(episodes, self.preference_rewards, strict=True)]

    def _episode(
        self,
        messages: list[Message],
        record: Mapping[str, Any],
        name: str,
        tokenizer: Tokenizer | None,
        ends: Mapping[str, bool],
    ) -> Episode:
        return self._rewarded(from_messages(messages, tokenizer, **ends), record, name, messages)

    def _rewarded(
        self, episode: Episode, record: Mapping[str, Any], name: str, messages: list[Message] | None
    ) -> Episode:
        if callable(self.reward):
            if messages is None:
                raise ValueError("a reward function needs messages, but this dialogue has turns: give their rewards")
            reward: Any = self.reward(messages)
        elif isinstance(self.reward, str) and name not in record:
            raise ValueError(f"the dialogue has no entry {name!r} for its reward, it has {shorten(sorted(record))}")
        elif name not in record:
            return episode
        else:
            reward = record[name]
        if isinstance(self.reward, str) and isinstance(reward, bool):  # as TRL labels a completion
            reward = float(reward)
        return _add_reward(episode, reward, may_be_list=messages is not None)


def parse_dialogue(line: str, *, ignore: Sequence[str] = ()) -> Episode:
    """Read one line of JSON as an episode; see :class:`DialogueReader`.

    Args:
        line: one JSON object with ``turns``, ``messages``, or ``prompt`` and ``completion``.
        ignore: keys of the object to ignore; any other unknown key is an error.

    Raises:
        ValueError: the line is malformed; the message gives the reason.

    Examples:
        >>> from torchrl_lang.data.jsonl import parse_dialogue
        >>> line = '{"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}], "reward": 2}'
        >>> parse_dialogue(line)
        Episode(turns=(Turn(text='hi', ...), Turn(text='yo', reward=2.0, ...)), terminated=True, ...)
    """
    episodes = DialogueReader(ignore=ignore)(parse_object(line))
    if len(episodes) > 1:
        raise ValueError("the line has a chosen and a rejected dialogue, expected one: use DialogueReader")
    return episodes[0]


def parse_object(line: str) -> Any:
    """A line of JSON, without keys that occur twice."""
    return json.loads(line, object_pairs_hook=unique_keys)


def _turns(turns: Any) -> list[Turn]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'turns' must be a list of at least one turn, got {show(turns)}")
    return [_turn(turn, f"turn {index}") for index, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> Turn:
    check_keys(turn, ("role", "text", "reward"), where)
    role, text = turn.get("role"), turn.get("text")
    if not isinstance(role, str) or role not in _BY_AGENT:
        raise ValueError(f"{where}: 'role' must be one of {list(_BY_AGENT)}, got {show(role)}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: 'text' must be a string, got {show(text)}")
    if _BY_AGENT[role]:
        return Turn(text, reward=read_number(turn.get("reward", 0), f"{where}: 'reward'"))
    if "reward" in turn:
        raise ValueError(f"{where}: only turns of the agent may have a reward, this one has the role {role!r}")
    return Turn(text)


def _messages(record: Mapping[str, Any], key: str, *, role: str | None = None) -> list[Message]:
    """An entry as messages; a text is one message of ``role``."""
    value = record.get(key)
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        expected = "a list of at least one message" + (" or a text" if role else "")
        raise ValueError(f"'{key}' must be {expected}, got {show(value)}")
    return value


def _add_reward(episode: Episode, reward: Any, *, may_be_list: bool = False) -> Episode:
    """Add one reward to the agent's last turn, or one to each of its turns."""
    turns = list(episode.turns)
    mine = [index for index, turn in enumerate(turns) if turn.by_agent]
    if may_be_list and isinstance(reward, Sequence) and not isinstance(reward, str):
        if len(reward) != len(mine):
            raise ValueError(f"there are {len(reward)} rewards for {len(mine)} turns of the agent: give one for each")
        earned = [read_number(value, "a reward") for value in reward]
    else:
        total = read_number(reward, "'reward'")
        if total and not mine:
            raise ValueError("'reward' is added to the agent's last turn, but there is no turn of the agent")
        earned = [0.0] * (len(mine) - 1) + [total] * bool(mine)
    for index, value in zip(mine, earned, strict=True):
        turns[index] = replace(turns[index], reward=(turns[index].reward or 0.0) + value)
    return replace(episode, turns=turns)


T = TypeVar("T")

_SHOWN = 5
_REMEDY = "fix them, or leave them out with on_error='skip'"


class BadLine(NamedTuple):
    """A line that cannot be read, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


class LineFile:
    """The lines of a file, as bytes."""

    item, no_dialogue = "line", "give a file with one JSON object per line"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        remedy = "give the path of a text file with one JSON object per line"
        with regular_file(self.path, remedy=remedy).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield number, line

    def error(self, what: str, remedy: str) -> FileError:
        """The error of a mistake in the file."""
        return FileError(self.path, what, remedy)


class Records:
    """Mappings from Python."""

    item, no_dialogue = "record", "give at least one record"

    def __init__(self, records: Iterable[Any]) -> None:
        self.records = records

    def __str__(self) -> str:
        return "the records"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self.records, start=1))

    def error(self, what: str, remedy: str) -> ValueError:
        """The error of a mistake in the records."""
        return ValueError(f"The iterable {what}: {remedy}.")


def good_items(
    source: LineFile | Records, convert: Callable[[Any], T], on_error: str, bad: list[BadLine]
) -> Iterator[tuple[int, T]]:
    """Number and value of each item that ``convert`` accepts; collects the others, and raises or warns at the end."""
    one_of("on_error", on_error, ("raise", "skip"))
    for number, item in source:
        try:
            value = convert(item.decode("utf-8") if isinstance(item, bytes) else item)
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(number, _reason(error)))
            if on_error == "raise" and len(bad) == _SHOWN:
                break
        else:
            yield number, value
    if not bad:
        return
    shown = "; ".join(f"{source.item} {line}: {reason}" for line, reason in bad[:_SHOWN])
    count = f"{len(bad)} bad {source.item}{'s' * (len(bad) > 1)}"
    if on_error == "raise":
        least = "at least " * (len(bad) == _SHOWN)  # reading stopped here
        raise source.error(f"holds {least}{count} ({shown})", _REMEDY)
    more = "; ..." if len(bad) > _SHOWN else ""
    warnings.warn(f"{count} of {source} skipped ({shown}{more}).", stacklevel=4)


def _reason(error: ValueError | RecursionError) -> str:
    """Why an item is bad."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


_BLOCK = 10_000
_READER = DialogueReader()


def read_jsonl(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    ignore: Sequence[str] = (),
) -> tuple[list[Episode], list[BadLine]]:
    """Read a file of dialogues.

    Empty lines are ignored.

    Args:
        path: the file, UTF-8, with or without a byte order mark, with one JSON object per line.
        tokenizer: that of the rows; needed for calls of tools.
        reader: reads a line's object: its form, and where rewards come from.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.
        ignore: keys of the objects to ignore, beside those that ``reader`` ignores.

    Returns:
        The episodes and the skipped lines.

    Raises:
        FileError: the file is missing, holds no dialogue, or holds bad lines and ``on_error`` is "raise".
    """
    source, bad = LineFile(Path(path)), list[BadLine]()
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    good = good_items(source, lambda line: read(parse_object(line), tokenizer), on_error, bad)
    episodes = [episode for _, every in good for episode in every]
    if not episodes:
        raise source.error("holds no dialogue", source.no_dialogue)
    return episodes, bad


def dataset_from_jsonl(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    ignore: Sequence[str] = (),
    overwrite: bool = False,
) -> RowDataset:
    """Make a dataset from a file of dialogues of any length.

    The manifest's ``notes`` list the skipped lines with reasons and the numbers of truncated lines; a warning gives
    their counts.

    Args:
        path: the file, UTF-8, with one JSON object per line.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        reader: reads a line's object: its form, and where rewards come from.
        on_error: see :func:`read_jsonl`; a dialogue that cannot be encoded is a bad line, too.
        on_overflow: "error" treats a dialogue that does not fit as a bad line, "truncate" keeps its beginning (see
            :func:`~torchrl_lang.text.to_rows`).
        ignore: keys of the objects to ignore, beside those that ``reader`` ignores.
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {Path(path).name}", overwrite=overwrite)
    _write(writer, LineFile(Path(path)), lambda line: read(parse_object(line), tokenizer), on_error, on_overflow)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def dataset_from_records(
    records: Iterable[Mapping[str, Any]],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    overwrite: bool = False,
    source: str = "records",
) -> RowDataset:
    """Make a dataset from records of dialogues, such as a Hugging Face dataset, streamed or in memory.

    The manifest's ``notes`` list the skipped records with reasons and the numbers of truncated ones, counted from 1.

    Args:
        records: mappings, read once.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        reader: reads a record: its form, and where rewards come from.
        on_error: as in :func:`dataset_from_jsonl`.
        on_overflow: as in :func:`dataset_from_jsonl`.
        overwrite: replace an existing dataset.
        source: where the records come from, recorded in the manifest.

    Raises:
        ValueError: there is no good record, or there are bad records and ``on_error`` is "raise".

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import DialogueReader, dataset_from_records
        >>> from torchrl_lang.text import CharTokenizer
        >>> records = [{"prompt": "ab", "completion": "c", "label": True}]  # a dataset of TRL's
        >>> tokenizer, reader = CharTokenizer.from_alphabet("abc"), DialogueReader(reward="label")
        >>> with tempfile.TemporaryDirectory() as home:
        ...     dataset = dataset_from_records(records, home + "/data", tokenizer, 12, reader=reader)
        ...     print(dataset.episode(0))
        Episode(turns=(Turn(text='ab', ...), Turn(text='c', reward=1.0, ...)), terminated=True, ...)
    """
    writer = DatasetWriter(folder, tokenizer, row_length, source=source, overwrite=overwrite)
    _write(writer, Records(records), lambda record: reader(record, tokenizer), on_error, on_overflow)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def _write(
    writer: DatasetWriter,
    source: LineFile | Records,
    read: Callable[[Any], list[Episode]],
    on_error: str,
    on_overflow: str,
) -> None:
    """Write the episodes of all items."""
    one_of("on_overflow", on_overflow, ("error", "truncate"))
    bad, truncated, block = list[BadLine](), list[int](), list[EncodedEpisode]()
    row_length, pad = writer.row_length, writer.tokenizer.control.pad

    def encode(item: Any) -> list[EncodedEpisode]:
        every = [encode_episode(episode, writer.tokenizer) for episode in read(item)]
        for encoded in every:
            if on_overflow == "error" and not fits(encoded, row_length):
                raise ValueError(f"the dialogue has {len(encoded.tokens)} tokens, row_length is {row_length}")
        return every

    with writer:
        for number, every in good_items(source, encode, on_error, bad):
            if not all(fits(encoded, row_length) for encoded in every):
                truncated.append(number)
            block += [cut_episode(encoded, row_length) for encoded in every]
            if len(block) >= _BLOCK:
                writer.extend(stack_episodes(block, pad, row_length))
                block.clear()
        if not writer.rows and not block:
            raise source.error("holds no dialogue", source.no_dialogue)
        writer.extend(stack_episodes(block, pad, row_length))
        writer.notes = {
            "skipped": [line._asdict() for line in bad],
            f"truncated_{source.item}s": truncated,
        }
    if truncated:
        warnings.warn(
            f"{len(truncated)} dialogues of {source} are longer than row_length={row_length} tokens and were "
            f"truncated; the first is {'on ' * (source.item == 'line')}{source.item} {truncated[0]}.",
            stacklevel=3,
        )
