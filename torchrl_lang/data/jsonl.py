"""Datasets from dialogues in JSON Lines files or any other records, with an error for every mistake."""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import BeforeValidator, Field

from torchrl_lang._checks import checked, is_history
from torchrl_lang._files import FileError, Record, regular_file, shorten, unique_keys, validate
from torchrl_lang.data.dataset import DatasetWriter, RowDataset, load_dataset
from torchrl_lang.schema import GROUP
from torchrl_lang.text.chat_template import Message
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import LARGEST_REWARD, Episode
from torchrl_lang.text.messages import from_messages
from torchrl_lang.text.rows import EncodedEpisode, cut_episode, encode_episode, fits, parts_of, stack_episodes
from torchrl_lang.text.tokenizers import Tokenizer

RewardOfMessages = Callable[[list[Message]], float | Sequence[float]]
"""Maps the messages of a conversation to its reward, or to one reward for each message of the assistant."""


# -- the forms of a record ---------------------------------------------------------------------------------------------


def _as_messages(role: str, value: Any) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


Messages = Annotated[list[Any], Field(min_length=1)]
Prompt = Annotated[Messages, BeforeValidator(partial(_as_messages, "user"))]
Completion = Annotated[Messages, BeforeValidator(partial(_as_messages, "assistant"))]


class TurnRecord(Record):
    """A turn of either side."""

    role: Literal["user", "environment", "assistant", "agent"]
    text: str
    reward: float = 0.0

    def message(self) -> dict[str, Any]:
        """The turn as a message, which may have a reward if it is the agent's."""
        earned = {"reward": self.reward} if "reward" in self.model_fields_set else {}
        return {"role": "assistant" if self.role in ("assistant", "agent") else "user", "content": self.text, **earned}


class Form(Record):
    """A dialogue without its reward, by turns or messages; see the subclasses."""

    truncated: bool = False
    terminated: bool = Field(default_factory=lambda given: not given.get("truncated"))


class OfTurns(Form):
    """A dialogue of turns."""

    turns: Annotated[list[TurnRecord], Field(min_length=1)]


class OfMessages(Form):
    """A dialogue of messages."""

    messages: Messages


class OfPrompt(Form):
    """A prompt and its completion."""

    prompt: Prompt = []
    completion: Completion


class Preference(Form):
    """A prompt with a better and a worse completion."""

    prompt: Prompt = []
    chosen: Completion
    rejected: Completion


def _after(prompt: list[Any], completion: list[Any]) -> list[Any]:
    """A completion behind its prompt, with which those of some datasets begin already."""
    return completion if completion[: len(prompt)] == prompt else [*prompt, *completion]


_FORMS: dict[str, tuple[type[Form], Callable[[Any], list[list[Any]]]]] = {
    "turns": (OfTurns, lambda found: [[turn.message() for turn in found.turns]]),
    "messages": (OfMessages, lambda found: [found.messages]),
    "completion": (OfPrompt, lambda found: [[*found.prompt, *found.completion]]),
    "chosen": (Preference, lambda found: [_after(found.prompt, text) for text in (found.chosen, found.rejected)]),
}
"""The entries that a dialogue of each form has, and its messages, for each episode."""


@dataclass(frozen=True, kw_only=True)
class DialogueReader:
    """Reads records of dialogues as episodes.

    A record is a mapping, such as a line of a JSONL file or a row of a Hugging Face dataset, with one of

    - ``turns``: objects with ``role`` ("user" or "environment", "assistant" or "agent"), ``text`` and, for the agent,
      ``reward`` (default 0);
    - ``messages``: see ``from_messages``;
    - ``prompt`` and ``completion``, as TRL has them: two texts, or two lists of messages;
    - ``chosen`` and ``rejected``, with or without a ``prompt``: two episodes, whose rows in a dataset have the number
      of the record as their ``group``, for :func:`~torchrl_lang.data.preference_pairs`.

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
        entries = dict(record) if isinstance(record, Mapping) else {}
        if any(map(is_history, (record, *entries.values()))):
            raise ValueError("a History of TorchRL: give {'messages': messages_from_history(history)}")
        key = next((key for key in _FORMS if entries.get(key) is not None), None)
        if key is None:
            raise ValueError(f"a dialogue must be an object with one of the entries {[*_FORMS]}, got {shorten(record)}")
        form, conversations_of = _FORMS[key]
        if form is not OfTurns:
            entries = {key: value for key, value in entries.items() if value is not None}  # tables fill gaps with None
        name = self.reward if isinstance(self.reward, str) else "reward"
        # Preferences have rewards of their own.
        beside = {*self.ignore, *(() if form is Preference else (name,))} - form.model_fields.keys()
        found = validate(form, {key: value for key, value in entries.items() if key not in beside}, "the dialogue")
        conversations, ends = conversations_of(found), {"terminated": found.terminated, "truncated": found.truncated}
        episodes = [from_messages(messages, tokenizer, **ends) for messages in conversations]
        if form is Preference:
            _refuse_later_turns(episodes, tokenizer)
            return [_add_reward(e, r) for e, r in zip(episodes, self.preference_rewards, strict=True)]
        if callable(self.reward):
            return [_add_reward(episodes[0], self.reward(conversations[0]), may_be_list=True)]
        if name in entries:
            is_label = self.reward is not None and isinstance(entries[name], bool)  # as TRL labels a completion
            reward = float(entries[name]) if is_label else entries[name]
            return [_add_reward(episodes[0], reward, may_be_list=form is not OfTurns)]
        if self.reward is not None:
            raise ValueError(f"the dialogue has no entry {name!r} for its reward, it has {shorten([*entries])}")
        return episodes


def _refuse_later_turns(episodes: Sequence[Episode], tokenizer: Tokenizer | None) -> None:
    """Raise ValueError if rows of single utterances would have no counterpart in the other dialogue."""
    if not isinstance(tokenizer, ChatTokenizer) or not tokenizer.row_format.rewrites:
        return
    alike = [one == other for one, other in zip(*(episode.turns for episode in episodes), strict=False)]
    first = (*alike, False).index(False)
    if max(sum(turn.by_agent for turn in episode.turns[first:]) for episode in episodes) > 1:
        what = "its chat template changes earlier turns: answers after the first that differs have none to compare with"
        raise ValueError(f"{what}: give that one alone, or a row format with history='kept'")


def _add_reward(episode: Episode, reward: Any, *, may_be_list: bool = False) -> Episode:
    """Add one reward to the agent's last turn, or one to each of its turns."""
    turns = list(episode.turns)
    mine = [index for index, turn in enumerate(turns) if turn.by_agent]
    if may_be_list and isinstance(reward, Sequence) and not isinstance(reward, str):
        if len(reward) != len(mine):
            raise ValueError(f"there are {len(reward)} rewards for {len(mine)} turns of the agent: give one for each")
        earned = [_number(value) for value in reward]
    else:
        total = _number(reward)
        if total and not mine:
            raise ValueError("the reward is added to the agent's last turn, but there is no turn of the agent")
        earned = [0.0] * (len(mine) - 1) + [total] * bool(mine)
    for index, value in zip(mine, earned, strict=True):
        turns[index] = replace(turns[index], reward=(turns[index].reward or 0.0) + value)
    return replace(episode, turns=turns)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD:
        raise ValueError(f"a reward must be a finite number, got {shorten(value)}")
    return float(value)


# -- files and other sources of records --------------------------------------------------------------------------------

T = TypeVar("T")

_SHOWN = 5


class BadLine(NamedTuple):
    """A line that cannot be read, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


@dataclass(frozen=True)
class Source:
    """Numbered records, those of a file as bytes."""

    items: Iterable[tuple[int, Any]]
    item: Literal["line", "record"]
    path: Path | None = None

    def __str__(self) -> str:
        return "the records" if self.path is None else str(self.path)

    def error(self, what: str, remedy: str) -> ValueError:
        """The error of a mistake in the records."""
        if self.path is None:
            return ValueError(f"The iterable {what}: {remedy}.")
        return FileError(self.path, what, remedy)

    def good(self, convert: Callable[[Any], T], on_error: str, bad: list[BadLine]) -> Iterator[tuple[int, T]]:
        """Number and value of each item that ``convert`` accepts; collects the others, raises or warns at the end."""
        for number, item in self.items:
            try:
                parsed = json.loads(item.decode("utf-8"), object_pairs_hook=unique_keys) if self.path else item
                value = convert(parsed)
            except (ValueError, RecursionError) as error:
                bad.append(BadLine(number, _reason(error)))
                if on_error == "raise" and len(bad) == _SHOWN:
                    break
            else:
                yield number, value
        if not bad:
            return
        lines: dict[str, list[str]] = {}
        for line, reason in bad[:_SHOWN]:
            lines.setdefault(reason, []).append(str(line))
        shown = "; ".join(f"{self.item}{'s' * (len(of) > 1)} {', '.join(of)}: {why}" for why, of in lines.items())
        count = f"{len(bad)} bad {self.item}{'s' * (len(bad) > 1)}"
        if on_error == "raise":
            least = "at least " * (len(bad) == _SHOWN)  # reading stopped here
            advice = "fix them, or leave them out with on_error='skip' (--on-error skip)"
            raise self.error(f"holds {least}{count} ({shown})", advice)
        more = "; ..." if len(bad) > _SHOWN else ""
        warnings.warn(f"{count} of {self} skipped ({shown}{more}).", stacklevel=5)


def _file(path: str | Path) -> Source:
    return Source(_lines(Path(path)), "line", Path(path))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with regular_file(path, "give the path of a text file with one JSON object per line").open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                yield number, line


def _reason(error: ValueError | RecursionError) -> str:
    """Why an item is bad."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


_BLOCK = 10_000
_READER = DialogueReader()
_NO_DIALOGUE = "give one JSON object per line, or at least one record"


@checked
def read_jsonl(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
) -> tuple[list[Episode], list[BadLine]]:
    """Read a file of dialogues.

    Empty lines are ignored.

    Args:
        path: the file, UTF-8, with or without a byte order mark, with one JSON object per line.
        tokenizer: that of the rows; needed for calls of tools.
        reader: reads a line's object: its form, and where rewards come from.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.

    Returns:
        The episodes and the skipped lines.

    Raises:
        FileError: the file is missing, holds no dialogue, or holds bad lines and ``on_error`` is "raise".
    """
    source, bad = _file(path), list[BadLine]()
    good = source.good(lambda record: reader(record, tokenizer), on_error, bad)
    episodes = [episode for _, every in good for episode in every]
    if not episodes:
        raise source.error("holds no dialogue", _NO_DIALOGUE)
    return episodes, bad


def dataset_from_jsonl(
    path: str | Path,
    folder: str | Path,
    tokenizer: Tokenizer,
    row_length: int,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
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
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, with a warning. A dialogue that
            cannot be encoded is a bad line, too.
        on_overflow: "error" treats a dialogue that does not fit as a bad line, "truncate" keeps its beginning (see
            :func:`~torchrl_lang.text.to_rows`).
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {Path(path).name}", overwrite=overwrite)
    return _write(writer, _file(path), reader, on_error, on_overflow)


def dataset_from_records(
    records: Iterable[Mapping[str, Any]],
    folder: str | Path,
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
    return _write(writer, Source(enumerate(records, start=1), "record"), reader, on_error, on_overflow)


@checked
def _write(
    writer: DatasetWriter,
    source: Source,
    read: DialogueReader,
    on_error: Literal["raise", "skip"],
    on_overflow: Literal["error", "truncate"],
) -> RowDataset:
    """Write the episodes of all items."""
    bad, truncated, block, numbers = list[BadLine](), list[int](), list[EncodedEpisode](), list[int]()
    row_length, tokenizer = writer.row_length, writer.tokenizer

    def encode(item: Any) -> list[EncodedEpisode]:
        episodes = read(item, tokenizer)
        if len(episodes) > 1 and not writer.rows:  # preferences: which episodes belong together is kept
            writer.keep = (GROUP,)
        every = [encode_episode(part, tokenizer) for episode in episodes for part in parts_of(episode, tokenizer)]
        for encoded in every:
            if on_overflow == "error" and not fits(encoded, row_length):
                raise ValueError(f"the dialogue has {len(encoded.tokens)} tokens, row_length is {row_length}")
        return every

    def write() -> None:
        rows = stack_episodes(block, tokenizer.control.pad, row_length)
        writer.extend(rows.set(GROUP, torch.tensor(numbers, dtype=torch.int64)))
        block.clear()
        numbers.clear()

    with writer:
        for number, every in source.good(encode, on_error, bad):
            if not all(fits(encoded, row_length) for encoded in every):
                truncated.append(number)
            block += [cut_episode(encoded, row_length) for encoded in every]
            numbers += [number] * len(every)
            if len(block) >= _BLOCK:
                write()
        if not writer.rows and not block:
            raise source.error("holds no dialogue", _NO_DIALOGUE)
        write()
        writer.notes = {"skipped": [line._asdict() for line in bad], f"truncated_{source.item}s": truncated}
    if truncated:
        found = f"{len(truncated)} dialogues of {source} are longer than row_length={row_length} tokens"
        warnings.warn(f"{found} and were truncated; the first is {source.item} {truncated[0]}.", stacklevel=4)
    return load_dataset(writer.folder, tokenizer=tokenizer, verify=False)
