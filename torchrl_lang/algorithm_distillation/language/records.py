"""Records of text tasks: who was asked what, what was answered and earned, in which epoch of which run."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, model_validator

from torchrl_lang._files import FileError, Record, file_errors, read_json_list, read_text, shorten

Count = Annotated[int, Field(ge=0)]


class TextRecord(Record):
    """One prompt and completion of a training run, with the reward of the completion.

    Args:
        query: the prompt; in a recorded run the text that the environment wrote since the last response.
        response: the completion, without the token that ends it.
        reward: what was paid for the completion.
        query_tokens: the ids of the prompt, with control tokens, if known.
        response_tokens: the ids of the completion, its end included, if known.
        log_probs: log-probability of each token of the completion under the model that wrote it, if known.
        run: name of the run.
        epoch: number of the epoch in its run: an iteration of training, played with the same weights.
        episode: number of the episode in its epoch, from 0; None if the record is an episode.
        turn: number of the completion in its episode, from 0.

    Raises:
        ValueError: a field has another type, a number is not finite or negative where it counts, or there are other
            numbers of log-probabilities than tokens.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextRecord
        >>> TextRecord(query="The film was", response="wonderful", reward=0.93, epoch=3, run="run-a").reward
        0.93
    """

    query: str
    response: str
    reward: float
    query_tokens: tuple[Count, ...] = ()
    response_tokens: tuple[Count, ...] = ()
    log_probs: tuple[float, ...] = ()
    run: str = ""
    epoch: Count = 0
    episode: Count | None = None
    turn: Count = 0

    @model_validator(mode="after")
    def _fit(self) -> TextRecord:
        if self.log_probs and self.response_tokens and len(self.log_probs) != len(self.response_tokens):
            raise ValueError(f"{len(self.log_probs)} log_probs for {len(self.response_tokens)} response_tokens")
        return self


def shortest_decimal(reward: float) -> float:
    """The number with the fewest digits that is the same float32: rows have -0.1 as -0.10000000149011612."""
    return float(str(np.float32(reward)))


def to_lines(records: Iterable[TextRecord]) -> str:
    """Records as JSON Lines."""
    return "".join(f"{record.model_dump_json()}\n" for record in records)


def read_text_records(path: str | Path, *, remedy: str = "correct the line") -> list[TextRecord]:
    """Read the records of a JSON Lines file.

    Args:
        path: the file.
        remedy: advice for the error.

    Raises:
        FileError: the file is missing, or a line is no record.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.algorithm_distillation.language import TextRecord
        >>> from torchrl_lang.algorithm_distillation.language.records import read_text_records, to_lines
        >>> record = TextRecord(query="The film was", response="wonderful", reward=0.93, epoch=3)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home, "records.jsonl")
        ...     _ = path.write_text(to_lines([record]))
        ...     read_text_records(path) == [record]
        True
    """
    path, records = Path(path), list[TextRecord]()
    for number, line in enumerate(read_text(path, remedy=remedy).split("\n"), start=1):
        with file_errors(path, f"holds no record on line {number}", remedy, ValidationError):
            records += [TextRecord.model_validate_json(line)] if line.strip() else []
    return records


# -- order and groups --------------------------------------------------------------------------------------------------


def in_epoch_order(records: Sequence[TextRecord]) -> list[list[TextRecord]]:
    """The records of each run by epoch, as they were given within an epoch; runs by name."""
    runs = sorted({record.run for record in records})
    return [sorted((each for each in records if each.run == run), key=lambda each: each.epoch) for run in runs]


def group_episodes(records: Sequence[TextRecord]) -> list[list[TextRecord]]:
    """The records of each run, epoch and episode, in the order of their first ones; those of others may be between."""
    found: dict[Hashable, list[TextRecord]] = {}
    for number, record in enumerate(records):
        key = number if record.episode is None else (record.run, record.epoch, record.episode)
        found.setdefault(key, []).append(record)
    return list(found.values())


def episode_records(records: Sequence[TextRecord]) -> list[TextRecord]:
    r"""One record for each episode of recorded turns, the turns of an episode one after another.

    The prompt is the dialogue up to the last response, one text a line, the completion is that response, and the reward
    is the return of the episode.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextRecord
        >>> from torchrl_lang.algorithm_distillation.language.records import episode_records
        >>> turns = [("a", "b", -1.0), ("ca", "c", 2.0)]
        >>> turns = [TextRecord(query=q, response=r, reward=earned, episode=0) for q, r, earned in turns]
        >>> [(each.query, each.response, each.reward) for each in episode_records(turns)]
        [('a\nb\nca', 'c', 1.0)]
    """
    found = list[TextRecord]()
    for turns in group_episodes(records):
        texts = [text for turn in turns for text in (turn.query, turn.response)][:-1]
        query = "\n".join(text for text in texts if text)  # the first query of many games is empty
        earned = shortest_decimal(sum(turn.reward for turn in turns))
        tokens = turns[-1].query_tokens if query == turns[-1].query else ()
        found.append(turns[-1].model_copy(update={"query": query, "reward": earned, "query_tokens": tokens}))
    return found


# -- a split -----------------------------------------------------------------------------------------------------------


class TextSplit(NamedTuple):
    """Records in the order of :func:`in_epoch_order`; no episode is in two of them."""

    train: list[TextRecord]
    validation: list[TextRecord]
    test: list[TextRecord]


def split_texts(
    records: Sequence[TextRecord],
    *,
    validation: float = 0.1,
    test: float = 0.1,
    test_runs: Sequence[str] = (),
    seed: int = 0,
) -> TextSplit:
    """Hold out random episodes along each run, so that all parts show the whole course of training.

    Of ``n`` episodes of an epoch ``test * n``, rounded, are for the report, and ``validation * n`` choose the
    checkpoint. Where that is less than one, the shares are added up from epoch to epoch: 10 % of epochs of two episodes
    are one of every fifth epoch. An epoch of several episodes leaves at least one to train on, and a run of three
    episodes or more has at least one in each part.

    The episodes of an epoch, which were played with the same weights, are shuffled: recorded runs have them in the
    order in which they began, so that the last of an epoch are the short ones.

    Args:
        records: the records, those of an episode in their order.
        validation: share of the episodes.
        test: share of the episodes, if there are no ``test_runs``.
        test_runs: names of runs of which all episodes are for the report, and that no other part has.
        seed: seed of the order in an epoch.

    Raises:
        ValueError: a run is unknown, a share is not from 0 to 1, the shares are together 1 or more, or a part is empty.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import TextRecord, split_texts
        >>> records = [
        ...     TextRecord(query="", response=f"{epoch}{number}", reward=0.0, epoch=epoch)
        ...     for epoch in range(2) for number in range(4)
        ... ]
        >>> [[record.response for record in part] for part in split_texts(records)]
        [['02', '00', '13', '12', '11', '10'], ['01'], ['03']]
    """
    test_share = None if test_runs else test
    runs = {record.run for record in records}
    if unknown := [run for run in test_runs if run not in runs]:
        raise ValueError(f"There is no run {shorten(unknown)}: the runs are {shorten(sorted(runs))}.")
    split, random = TextSplit([], [], []), np.random.default_rng(seed)
    for run in in_epoch_order(records):
        epochs = [list(group) for _, group in groupby(group_episodes(run), key=lambda episode: episode[0].epoch)]
        sizes = [len(epoch) for epoch in epochs]
        held = _held_out(sizes, validation, test_share)
        if run[0].run in test_runs:
            held = [(0, size) for size in sizes]
        for episodes, (chosen, reported) in zip(epochs, held, strict=True):
            epoch = [episodes[place] for place in random.permutation(len(episodes))]
            last = len(epoch) - reported
            first = last - chosen
            for part, kept in zip(split, (epoch[:first], epoch[first:last], epoch[last:]), strict=True):
                part.extend(record for episode in kept for record in episode)
    if not all(split) or min(validation, test) < 0 or validation + (test_share or 0) >= 1:
        given = f"validation={validation}, test={test} and test_runs={list(test_runs)}"
        raise ValueError(f"No episode is left for a part with {given}: give other shares, or more episodes.")
    return split


def _held_out(sizes: Sequence[int], validation: float, test: float | None) -> list[tuple[int, int]]:
    """How many episodes of each epoch of a run are for validation and for the test; None: no test.

    A share of less than one episode is carried to the next epoch, as is what an epoch has no room for.
    """
    total, found = sum(sizes), list[tuple[int, int]]()
    due = [0.5, 0.5]  # so that the sum is rounded, not cut
    for size in sizes:
        room = max(1, size - 1)
        taken = [0, 0]
        for part, share in ((1, test), (0, validation)):
            if share is None:
                continue
            wanted = max(share, 1 / total) * size
            due[part] += round(wanted) if wanted >= 1 else wanted
            taken[part] = min(int(due[part] + 1e-9), room)  # ten times 0.1 is less than 1
            due[part] -= taken[part]
            room -= taken[part]
        found.append((taken[0], taken[1]))
    return found


# -- logs of trlx ------------------------------------------------------------------------------------------------------

_CONFIG, _LOG_REMEDY = "config.json", "log the run again, or remove it"
_BAD_LOG = (ValueError, TypeError, KeyError, IndexError, AttributeError)
_NUMBER = re.compile(r"\d+(\.\d+)?$")


def read_run_logs(folder: str | Path, decode: Callable[[Sequence[int]], str] | None = None) -> list[TextRecord]:
    """Read logs of PPO runs that the fork of trlx behind Algorithm-Distillation-RLHF wrote, by run and epoch.

    A folder holds ``run-<id>/config.json`` and one ``run-<id>/epoch-<time>.json`` for each epoch: a list of objects
    with ``query_tensor``, ``response_tensor``, ``rewards``, ``logprobs`` and ``values``, one number a token. The
    repository's command that decodes adds ``query_text`` and ``response_text``. Rewards include the KL penalty, and the
    last one the score of the whole text, which is the reward of the record. A ``response_tensor`` is padded to the
    longest completion of its batch, the others are not.

    Epochs are sorted by the number at the end of the file's name, as a number (``epoch-9`` before ``epoch-10``), and
    counted from 0.

    Args:
        folder: holds the folders ``run-*``.
        decode: text of ids, for logs without texts, such as ``lambda ids: tokenizer.decode(ids,
            skip_special_tokens=True)``.

    Raises:
        FileError: a file is missing or damaged, has no number in its name, or has no texts and ``decode`` is None.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.algorithm_distillation.language import read_run_logs
        >>> with tempfile.TemporaryDirectory() as home:
        ...     run = pathlib.Path(home) / "run-1f"
        ...     run.mkdir()
        ...     for number in (10, 9):
        ...         one = {"query_text": "q", "response_text": f"r{number}", "rewards": [0.5], "logprobs": [-1.0]}
        ...         _ = (run / f"epoch-{number}.json").write_text(json.dumps([one]))
        ...     [(record.response, record.epoch) for record in read_run_logs(home)]
        [('r9', 0), ('r10', 1)]
    """
    records = list[TextRecord]()
    for run in run_folders(Path(folder)):
        epochs = sorted((path for path in run.glob("*.json") if path.name != _CONFIG), key=_epoch_number)
        for epoch, path in enumerate(epochs):
            for place, content in enumerate(read_json_list(path, remedy=_LOG_REMEDY)):
                with file_errors(path, f"holds a bad rollout {place}", _LOG_REMEDY, *_BAD_LOG):
                    records.append(_logged(content, epoch, run.name, decode))
    return records


def run_folders(home: Path) -> list[Path]:
    """The folders of the runs in a folder, by name; FileError if there are none."""
    runs = sorted(path for path in home.glob("run-*") if path.is_dir())
    if not runs:
        raise FileError(home, "has no folder run-*", "give the folder of the runs, such as that of --record-history")
    return runs


def _epoch_number(path: Path) -> Decimal:
    match = _NUMBER.search(path.stem)
    if match is None:
        raise FileError(path, "has no number at the end of its name, which orders the epochs", "rename it")
    return Decimal(match.group())


def _logged(content: Any, epoch: int, run: str, decode: Callable[[Sequence[int]], str] | None) -> TextRecord:
    """The record of a rollout; other fields, such as ``values``, are ignored."""
    rewards, log_probs = tuple(content["rewards"]), tuple(content.get("logprobs", ()))
    query, response = (tuple(content.get(f"{name}_tensor", ())) for name in ("query", "response"))
    padding = response[len(log_probs) :]
    if len(rewards) == len(log_probs) > 0 and len(set(padding)) == 1:
        response = response[: len(log_probs)]
    found: dict[str, Any] = {"query_tokens": query, "response_tokens": response, "log_probs": log_probs}
    for name, tokens in (("query", query), ("response", response)):
        if f"{name}_text" not in content and decode is None:
            raise ValueError(f"it has no {name}_text: decode the logs first, or pass decode=")
        found[name] = content[f"{name}_text"] if decode is None or f"{name}_text" in content else decode(list(tokens))
    return TextRecord(**found, reward=rewards[-1], epoch=epoch, run=run)
