"""Rows of text tasks: blocks of prompt, completion and reward, packed by epoch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.quantizer import Quantizer
from torchrl_lang.algorithm_distillation.language.records import TextRecord, group_episodes, in_epoch_order
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn, stack_rows
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.text import Tokenizer

_TEXTS = ("Prompt: ", "\nCompletion:", "Reward:", "\n\n")
"""Before the prompt, the completion and the reward, and after the reward."""
_BLOCK = re.compile(r"Prompt: (.*?)\nCompletion: (.*?)\nReward: (\S+)\n\n", re.DOTALL)


@dataclass(frozen=True)
class BlockTemplate:
    r"""How records of text tasks are written: ``Prompt: ...\nCompletion: ...\nReward: ...\n\n``, block after block.

    The names are those of the sentiment task of the repository Algorithm-Distillation-RLHF. A completion ends with its
    line break, which is the agent's too: that is how a model shows that it is complete.

    Args:
        reward: quantizer of the reward.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import BlockTemplate, Quantizer, TextRecord
        >>> template = BlockTemplate(Quantizer.bins(0, 1, 10))
        >>> text = template.write(TextRecord(query="The film was", response="wonderful", reward=0.93))
        >>> text
        'Prompt: The film was\nCompletion: wonderful\nReward: 9\n\n'
        >>> template.can_write(TextRecord(query="q", response="a\nReward: 2\n\n", reward=1.0))
        False
    """

    reward: Quantizer = field(default_factory=Quantizer.decimals)
    after: ClassVar[str] = _TEXTS[-1]
    """The text after the reward."""

    def prompt(self, query: str) -> str:
        """The text after which a model writes the completion, with a space before it."""
        return f"{_TEXTS[0]}{query}{_TEXTS[1]}"

    def segments(self, record: TextRecord) -> list[tuple[str, TokenKind]]:
        """The parts of a block, which are encoded each on its own, so that no token is of two kinds.

        Raises:
            ValueError: the reward has no word.
        """
        (word,) = self.reward.write(torch.tensor([record.reward], dtype=torch.float64))
        return [
            (self.prompt(record.query), TokenKind.FORMAT),
            (f" {record.response}\n", TokenKind.ACTION),
            (_TEXTS[2], TokenKind.FORMAT),
            (f" {word}", TokenKind.REWARD),
            (self.after, TokenKind.FORMAT),
        ]

    def can_write(self, record: TextRecord) -> bool:
        """Whether the texts of a record have no lines of the template, so that its block can be read back.

        Raises:
            ValueError: the reward has no word.
        """
        parts = self.segments(record)
        text = "".join(part for part, _ in parts)
        match = _BLOCK.match(text)
        found = (record.query, record.response, parts[3][0][1:])
        return match is not None and match.end() == len(text) and match.groups() == found

    def write(self, record: TextRecord) -> str:
        """The text of a block.

        Raises:
            ValueError: its texts contain lines of the template and could not be read back, or the reward has no word.
        """
        if not self.can_write(record):
            texts = f"{shorten(record.query)} and {shorten(record.response)}"
            raise ValueError(f"{texts} contain lines of the template and could not be read back: leave them out.")
        return "".join(text for text, _ in self.segments(record))

    def vocabulary(self) -> list[str]:
        """Symbols for a tokenizer in which each reward is one token, or each character of a decimal number."""
        first, inner = self.reward.pieces
        return [*(f" {piece}" for piece in first), *inner]


class PackedBlocks(NamedTuple):
    """Rows of blocks."""

    rows: TensorDict
    """``[N]``, with the entries of :class:`~torchrl_lang.algorithm_distillation.language.StepRows`."""
    left_out: list[TextRecord]
    """The records of episodes that alone are longer than a row, or have lines of the template in a text."""


@checked
def pack_blocks(
    records: Sequence[TextRecord],
    template: BlockTemplate,
    tokenizer: Tokenizer,
    row_length: Count,
    *,
    loss_on: LossOn = "actions",
) -> PackedBlocks:
    """Pack the blocks of each run into rows: by epoch, as many episodes as fit, and the next one begins the next row.

    A row has the blocks of one run, and all blocks of an episode are in one row. ``agent_mask`` is True on the
    completions, and the last token of each has the block's ``token_reward``; see
    :class:`~torchrl_lang.algorithm_distillation.language.StepRows` for ``loss_on="all"``.

    Args:
        records: the records, those of an episode in their order.
        template: how blocks are written.
        tokenizer: encodes each part of a block on its own, so that no token is of two kinds.
        row_length: ``T``. An episode that alone is longer, or has lines of the template in a text, is left out as a
            whole, with a warning, and returned.
        loss_on: "actions" for completions, or "all".

    Raises:
        ValueError: there is no record, no episode fits, or a reward has no word.

    Examples:
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.algorithm_distillation.language import BlockTemplate, TextRecord, pack_blocks
        >>> template = BlockTemplate()
        >>> records = [TextRecord(query="q", response="r", reward=0.5, epoch=n) for n in range(4)]
        >>> tokenizer = word_tokenizer([template.write(records[0])], symbols=template.vocabulary())
        >>> packed = pack_blocks(records, template, tokenizer, 64)
        >>> packed.rows["tokens"].shape, packed.left_out
        (torch.Size([2, 64]), [])
    """
    rows, left_out = list[list[_Block]](), list[TextRecord]()
    for run in in_epoch_order(records):
        room = 0
        for episode in group_episodes(run):
            fits = all(map(template.can_write, episode))
            blocks = [_encode(record, template, tokenizer) for record in episode if fits]
            length = sum(len(ids) for ids, *_ in blocks)
            if not fits or length >= row_length:
                left_out += episode
                continue
            if length > room:
                rows.append([])
                room = row_length - 1  # the first token is a control token
            rows[-1] += blocks
            room -= length
    if not rows:
        raise ValueError(f"No episode of {len(records)} blocks fits a row of {row_length} tokens: give longer rows.")
    if left_out:
        found = f"longer than {row_length=} tokens, or with lines of the template in a text, and were left out"
        warnings.warn(f"{len(left_out)} of {len(records)} blocks are of episodes {found}.", stacklevel=3)
    columns = zip(*(map(torch.cat, zip(*blocks, strict=True)) for blocks in rows), strict=True)
    padded = (pad_sequence(list(column), batch_first=True, padding_value=-1) for column in columns)
    stacked = stack_rows(*padded, tokenizer=tokenizer, row_length=row_length, loss_on=loss_on)
    return PackedBlocks(stacked, left_out)


_Block = tuple[Tensor, Tensor, Tensor]
"""The tokens of a block, with their kinds and rewards, each ``[L]``."""


def _encode(record: TextRecord, template: BlockTemplate, tokenizer: Tokenizer) -> _Block:
    encoded = [(token, int(of)) for text, of in template.segments(record) for token in tokenizer.encode(text)]
    ids, kind = torch.tensor(encoded).unbind(-1)
    earned = torch.zeros(len(ids))
    earned[(kind == TokenKind.ACTION).nonzero()[-1]] = record.reward
    return ids, kind, earned
