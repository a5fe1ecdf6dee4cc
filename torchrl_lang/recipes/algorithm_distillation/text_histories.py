"""Histories of text tasks to learn from: read, split into episodes to train on and to hold out, and packed as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict

from torchrl_lang._files import json_digest, shorten
from torchrl_lang.algorithm_distillation.language import (
    Bins,
    Block,
    BlockTemplate,
    Decimals,
    Levels,
    TextHistory,
    TextSplit,
    group_episodes,
    pack_blocks,
    read_run_logs,
    run_texts,
    split_texts,
)
from torchrl_lang.algorithm_distillation.language.run_texts import BlockOf
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn
from torchrl_lang.algorithm_distillation.run_recorder import read_run
from torchrl_lang.recipes.options import Options, option, required
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer

__all__ = ["TextHistories", "TextHistoryOptions", "open_histories"]

_MOST = 100
"""Number of different rewards that a model chooses among, without bins."""


@dataclass(frozen=True, kw_only=True)
class TextHistoryOptions(Options):
    """Options of the histories."""

    runs: tuple[Path, ...] = required("folders of --record-history, each with the histories of one or more runs")
    logs: bool = option(False, "the folders hold logs of Algorithm-Distillation-RLHF instead")
    block: BlockOf = option(
        "turn",
        "turn: a block is what the environment wrote, the response and the reward of the turn; episode: the dialogue "
        "up to the last response, that response and the return",
    )
    reward: Literal["levels", "bins", "decimals"] = option(
        "levels", "levels: a word for each different reward; bins: one for each of --bins ranges; decimals: in digits"
    )
    bins: int = option(10, "number of ranges that rewards are sorted into with --reward bins", at_least=2)
    validation: float = option(
        0.1,
        "share of each epoch's episodes that choose the checkpoint",
        above=0,
        below=1,
    )
    test: float = option(0.1, "share of each epoch's episodes that are reported", above=0, below=1)
    test_runs: tuple[str, ...] = option((), "names of runs that are reported instead, of which no episode is learned")
    split_seed: int = option(0, "seed of which episodes of an epoch these are", at_least=0)
    row_length: int = option(512, "tokens of a row: the context", at_least=2)
    loss_on: LossOn = option("all", "learn from all tokens, or from the completions alone")
    symbols: tuple[str, ...] = option((), "texts that are one token each, such as the colours of Wordle")
    min_count: int = option(5, "words that are rarer in the histories are spelled", at_least=1)
    pretrained: str | None = option(
        None, "name or folder of a pretrained Hugging Face model with its tokenizer; none: from scratch"
    )


class TextHistories(NamedTuple):
    """Rows to learn from and to report, and how they were written."""

    rows: TextRows
    template: BlockTemplate
    tokenizer: Tokenizer
    values: list[float] | None
    """The rewards to choose among, where they are written in digits."""
    about: dict[str, Any]
    """Numbers of runs, episodes and blocks in each part, as JSON."""
    digest: str
    """Of all records, to recognise them when a run is resumed."""


class TextRows(NamedTuple):
    """Rows ``[N]`` of each part of the histories."""

    train: TensorDict
    validation: TensorDict
    test: TensorDict


def open_histories(options: TextHistoryOptions) -> TextHistories:
    """Read the histories, split and pack them.

    Raises:
        FileNotFoundError: there is no run in a folder.
        FileError: a history is damaged.
        ValueError: two runs have one name, there are no episodes for a part, no episode fits a row, or the rewards are
            too many to choose among.
    """
    given = None if options.pretrained is None else HFTokenizer(options.pretrained)
    records = _read(options, given)
    values = torch.tensor([record.reward for record in records], dtype=torch.float32).unique()
    template = _template(options, values)
    split = split_texts(
        records,
        validation=options.validation,
        test=options.test,
        test_runs=options.test_runs,
        seed=options.split_seed,
    )
    tokenizer: Tokenizer = _word_tokenizer(options, template, split) if given is None else given
    packed = [pack_blocks(part, template, tokenizer, options.row_length, loss_on=options.loss_on) for part in split]
    about = {name: _count(part) for name, part in split._asdict().items()}
    for of_part, found in zip(about.values(), packed, strict=True):
        of_part |= {"blocks_left_out": len(found.left_out), "rows": len(found.rows)}
    chosen = sorted({record.reward for record in records}) if options.reward == "decimals" else None
    digest = json_digest({"records": [asdict(record) for record in records]})
    return TextHistories(TextRows(*(each.rows for each in packed)), template, tokenizer, chosen, about, digest)


def _read(options: TextHistoryOptions, tokenizer: HFTokenizer | None) -> list[TextHistory]:
    """The records of all folders."""
    found, names = list[TextHistory](), set[str]()
    for home in options.runs:
        records = _logged(home, tokenizer) if options.logs else _recorded(home, options.block)
        own = {record.run for record in records}
        if twice := sorted(names & own):
            raise ValueError(f"Two folders of {shorten(options.runs)} have a run {shorten(twice)}: rename one of them.")
        found, names = found + records, names | own
    if not found:
        raise ValueError(f"The histories in {shorten(options.runs)} have no episode yet: record some iterations first.")
    return found


def _logged(home: Path, tokenizer: HFTokenizer | None) -> list[TextHistory]:
    decode = None if tokenizer is None else partial(tokenizer.backend.decode, skip_special_tokens=True)
    return read_run_logs(home, decode).records


def _recorded(home: Path, block_of: BlockOf) -> list[TextHistory]:
    runs = sorted(path for path in home.glob("run-*") if path.is_dir())
    if not runs:
        raise FileNotFoundError(
            f"There is no folder run-* in {home}: give the folder that `train ppo --record-history` was given."
        )
    return [record for run in runs for record in run_texts(read_run(run), block_of)]


def _template(options: TextHistoryOptions, values: torch.Tensor) -> BlockTemplate:
    """How blocks are written, with the rewards float32 ``[R]``."""
    if options.reward == "bins":
        low, high = float(values[0]), float(values[-1])
        if low == high:
            raise ValueError(f"All rewards of the histories are {low}: there is no range for bins.")
        return BlockTemplate(Bins(low, high, options.bins, outside="nearest"))  # float32 rounds the ends
    if len(values) > _MOST:
        raise ValueError(
            f"The histories have {len(values)} different rewards, more than {_MOST} to choose among: give --reward "
            "bins."
        )
    if options.reward == "decimals":
        return BlockTemplate(Decimals())
    return BlockTemplate(Levels(values.tolist(), Decimals().write(values), outside="nearest"))


def _word_tokenizer(options: TextHistoryOptions, template: BlockTemplate, split: TextSplit) -> Tokenizer:
    """A tokenizer of the words of the episodes to train on, and of the characters of all."""
    names = [template.prompt_name, template.completion_name, template.reward_name]
    texts = (f"{record.query} {record.response}" for part in split for record in part)
    further = sorted({letter for text in texts for letter in text if not " " <= letter <= "~"} - {"\n"})
    symbols = [*names, *template.vocabulary(), *options.symbols, *further]
    return word_tokenizer(_texts(template, split.train), min_count=options.min_count, symbols=symbols)


def _texts(template: BlockTemplate, records: Sequence[TextHistory]) -> Iterator[str]:
    blocks = (Block(record.query, record.response, record.reward) for record in records)
    return (template.write(block) for block in blocks if template.can_write(block))  # pack_blocks leaves the others out


def _count(records: Sequence[TextHistory]) -> dict[str, Any]:
    runs = sorted({record.run for record in records})
    return {"runs": runs, "episodes": len(group_episodes(records)), "blocks": len(records)}
