"""Rows of text tasks: blocks of prompt, completion and reward, packed by epoch, or one row for each record."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang._checks import check_options
from torchrl_lang._files import shorten
from torchrl_lang.algorithm_distillation.language.quantizer import Quantizer
from torchrl_lang.algorithm_distillation.language.records import TextRecord, group_episodes, in_epoch_order
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn, stack_rows
from torchrl_lang.algorithm_distillation.language.template import TokenKind
from torchrl_lang.schema import AGENT_MASK, EPISODE, REWARD, TOKEN_LOG_PROB
from torchrl_lang.text import Episode, Tokenizer, Turn, to_rows

__all__ = ["BlockTemplate", "PackedBlocks", "completion_rows", "pack_blocks"]

_PATTERN = re.compile(r"(.*?)\{query\}(.*?) \{response\}\n(.*?) \{reward\}(\n.*)", re.DOTALL)


@dataclass(frozen=True)
class BlockTemplate:
    r"""How records of text tasks are written: ``Prompt: ...\nCompletion: ...\nReward: ...\n\n``, block after block.

    The names are those of the sentiment task of the repository Algorithm-Distillation-RLHF. A completion ends with its
    line break, which is the agent's too: that is how a model shows that it is complete.

    Args:
        reward: quantizer of the reward.
        pattern: text with ``{query}``, then ``{response}`` and ``{reward}`` between a space and a line break.

    Raises:
        ValueError: the pattern has other fields.

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
    pattern: str = "Prompt: {query}\nCompletion: {response}\nReward: {reward}\n\n"

    def __post_init__(self) -> None:
        if not _PATTERN.fullmatch(self.pattern):
            raise ValueError(f"A pattern has {{query}}, ' {{response}}\\n' and ' {{reward}}\\n', got {self.pattern!r}.")

    @property
    def _texts(self) -> list[str]:
        """The texts before the prompt, the completion and the reward, and after the reward."""
        return list(_PATTERN.split(self.pattern)[1:-1])

    @property
    def after(self) -> str:
        """The text after the reward."""
        return self._texts[-1]

    def prompt(self, query: str) -> str:
        """The text after which a model writes the completion, with a space before it."""
        before, after, *_ = self._texts
        return f"{before}{query}{after}"

    def segments(self, record: TextRecord) -> list[tuple[str, TokenKind]]:
        """The parts of a block, which are encoded each on its own, so that no token is of two kinds.

        Raises:
            ValueError: the reward has no word.
        """
        (word,) = self.reward.write(torch.tensor([record.reward], dtype=torch.float64))
        *_, before, after = self._texts
        return [
            (self.prompt(record.query), TokenKind.FORMAT),
            (f" {record.response}\n", TokenKind.ACTION),
            (before, TokenKind.FORMAT),
            (f" {word}", TokenKind.REWARD),
            (after, TokenKind.FORMAT),
        ]

    def can_write(self, record: TextRecord) -> bool:
        """Whether the texts of a record have no lines of the template, so that its block can be read back.

        Raises:
            ValueError: the reward has no word.
        """
        parts = self.segments(record)
        match = self._regex.match("".join(part for part, _ in parts))
        found = (record.query, record.response, parts[3][0][1:])
        return match is not None and match.end() == len(match.string) and match.groups() == found

    @property
    def _regex(self) -> re.Pattern[str]:
        first, second, third, last = map(re.escape, self._texts)
        return re.compile(rf"{first}(.*?){second} (.*?)\n{third} (\S+){last}", re.DOTALL)

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


def pack_blocks(
    records: Sequence[TextRecord],
    template: BlockTemplate,
    tokenizer: Tokenizer,
    row_length: int,
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
    check_options(row_length=(row_length, 1), loss_on=(loss_on, ("actions", "all")))
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
        warnings.warn(
            f"{len(left_out)} of {len(records)} blocks are of episodes longer than row_length={row_length} tokens, or "
            f"with lines of the template in a text, and were left out.",
            stacklevel=2,
        )
    columns = zip(*(map(torch.cat, zip(*blocks, strict=True)) for blocks in rows), strict=True)
    padded = (pad_sequence(list(column), batch_first=True, padding_value=-1) for column in columns)
    return PackedBlocks(stack_rows(*padded, tokenizer, row_length=row_length, loss_on=loss_on), left_out)


_Block = tuple[Tensor, Tensor, Tensor]
"""The tokens of a block, with their kinds and rewards, each ``[L]``."""


def _encode(record: TextRecord, template: BlockTemplate, tokenizer: Tokenizer) -> _Block:
    encoded = [(token, int(of)) for text, of in template.segments(record) for token in tokenizer.encode(text)]
    ids, kind = torch.tensor(encoded).unbind(-1)
    earned = torch.zeros(len(ids))
    earned[(kind == TokenKind.ACTION).nonzero()[-1]] = record.reward
    return ids, kind, earned


def completion_rows(records: Sequence[TextRecord], tokenizer: Tokenizer, row_length: int) -> TensorDict:
    """One row for each record, ``[N]``, in the schema of this library: the prompt, then the completion.

    Records with ``query_tokens`` and ``response_tokens`` keep these ids, except that a row has control tokens of its
    own: an end of the action that was recorded is the agent's. In a run that records control tokens, such as those of
    :class:`RunRecorder`, a response without it was cut off: its end is not the
    agent's.

    If all records have ``response_tokens`` and ``log_probs``, there is an entry ``token_log_prob``, float32 ``[N, T]``,
    zero elsewhere. Further entries are ``reward`` float32 ``[N, 1]``, that of the completion, and ``episode`` int64
    ``[N]``, the epoch.

    Raises:
        ValueError: a row does not fit, or a text cannot be encoded.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.algorithm_distillation.language import TextRecord
        >>> from torchrl_lang.algorithm_distillation.language.block_rows import completion_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> record = TextRecord(query="a", response="bc", reward=0.5, response_tokens=(1, 2), log_probs=(-1, -2))
        >>> rows = completion_rows([record], tokenizer, 8)
        >>> rows["token_log_prob"], rows["token_reward"]
        (tensor([[ 0.,  0.,  0., -1., -2.,  0.,  0.,  0.]]), tensor([[0.0000, ..., 0.5000, 0.0000, 0.0000]]))
    """
    control = set(tokenizer.control.ids())
    marked = {each.run for each in records if control.intersection(each.query_tokens + each.response_tokens)}
    episodes = [Episode(_turns(each, tokenizer, each.run in marked), terminated=True) for each in records]
    rows = to_rows(episodes, tokenizer, row_length)
    rows[REWARD] = torch.tensor([[each.reward] for each in records], dtype=torch.float32)
    rows[EPISODE] = torch.tensor([each.epoch for each in records])
    if all(each.response_tokens and each.log_probs for each in records):
        rows[TOKEN_LOG_PROB] = _log_probs(records, rows[AGENT_MASK])
    return rows


def _turns(record: TextRecord, tokenizer: Tokenizer, is_marked: bool) -> list[Turn]:
    """Prompt and completion; with ``is_marked`` a completion without its end token was cut off."""
    control, query, response = tokenizer.control, record.query_tokens, record.response_tokens
    has_end = response[-1:] == (control.end_of_action,)
    if control.marks_turns:  # otherwise they are in the strings of the chat template
        query = tuple(token for token in query if token not in control.ids())
    return [
        Turn(record.query, tokens=query if record.query_tokens else None),
        Turn(
            record.response,
            record.reward,
            closed=has_end or not response or not is_marked,
            tokens=response[: len(response) - has_end] if response else None,
        ),
    ]


def _log_probs(records: Sequence[TextRecord], agent_mask: Tensor) -> Tensor:
    """The log-probabilities of the completions' tokens, float32 ``[N, T]``; zero on an end that was not recorded."""
    out = torch.zeros(agent_mask.shape)
    first = agent_mask.long().argmax(-1).tolist()
    for place, record in enumerate(records):
        end = first[place] + len(record.log_probs)
        out[place, first[place] : end] = torch.tensor(record.log_probs)
    return out
