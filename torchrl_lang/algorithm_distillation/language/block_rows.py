"""Rows of text histories: blocks packed in the order of epochs, or one row for each record."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import at_least_one, one_of
from torchrl_lang.algorithm_distillation.language.block_template import Block, BlockTemplate
from torchrl_lang.algorithm_distillation.language.step_rows import LossOn, begin_token, stack_rows
from torchrl_lang.algorithm_distillation.language.step_template import TokenKind
from torchrl_lang.algorithm_distillation.language.text_history import TextHistory, group_episodes, in_epoch_order
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, EPISODE, REWARD, TOKEN_LOG_PROB, TOKENS
from torchrl_lang.text import Episode, Tokenizer, Turn, to_rows

__all__ = ["PackedBlocks", "completion_rows", "pack_blocks", "read_blocks"]


class PackedBlocks(NamedTuple):
    """Rows of blocks."""

    rows: TensorDict
    """``[N]``, with the entries of :class:`~torchrl_lang.algorithm_distillation.language.StepRows`."""
    left_out: list[TextHistory]
    """The records of episodes that alone are longer than a row, or have lines of the template in a text."""


def pack_blocks(
    records: Sequence[TextHistory],
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
        >>> from torchrl_lang.algorithm_distillation.language import Block, BlockTemplate
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, pack_blocks, read_blocks
        >>> template = BlockTemplate()
        >>> tokenizer = word_tokenizer([template.write(Block("", "", 0.0))], symbols=template.vocabulary())
        >>> records = [TextHistory(query="q", response="r", rewards=(0.5,), epoch=n) for n in range(4)]
        >>> packed = pack_blocks(records, template, tokenizer, 64)
        >>> [len(read_blocks(row, template, tokenizer)) for row in packed.rows], packed.left_out
        ([3, 1], [])
    """
    at_least_one("row_length", row_length)
    one_of("loss_on", loss_on, ("actions", "all"))
    rows, left_out = list[list[_Block]](), list[TextHistory]()
    for run in in_epoch_order(records):
        room = 0
        for episode in group_episodes(run):
            fits = all(template.can_write(_block(record)) for record in episode)
            blocks = [_encode(record, template, tokenizer) for record in episode if fits]
            length = sum(len(block.ids) for block in blocks)
            if not fits or length >= row_length:
                left_out += episode
                continue
            if length > room:
                rows.append([])
                room = row_length - 1  # the first token is a control token
            rows[-1] += blocks
            room -= length
    if not rows:
        raise ValueError(
            f"No episode of {len(records)} blocks fits a row of {row_length} tokens: give a longer row_length, or "
            f"episodes without lines of the template in a text."
        )
    if left_out:
        warnings.warn(
            f"{len(left_out)} of {len(records)} blocks are of episodes longer than row_length={row_length} tokens, or "
            f"with lines of the template in a text, and were left out; the first is that of the prompt "
            f"{left_out[0].query[:60]!r}.",
            stacklevel=2,
        )
    return PackedBlocks(_stack(rows, tokenizer, row_length, loss_on), left_out)


class _Block(NamedTuple):
    """The tokens of a block, with their kinds and rewards."""

    ids: list[int]
    kind: list[int]
    earned: list[float]


def _block(record: TextHistory) -> Block:
    return Block(record.query, record.response, record.reward)


def _encode(record: TextHistory, template: BlockTemplate, tokenizer: Tokenizer) -> _Block:
    ids, kind = list[int](), list[int]()
    for text, of in template.segments(_block(record)):
        encoded = tokenizer.encode(text)
        ids, kind = ids + encoded, kind + [int(of)] * len(encoded)
    earned = [0.0] * len(ids)
    earned[len(ids) - 1 - kind[::-1].index(TokenKind.ACTION)] = record.reward
    return _Block(ids, kind, earned)


def _stack(rows: Sequence[Sequence[_Block]], tokenizer: Tokenizer, row_length: int, loss_on: LossOn) -> TensorDict:
    shape = (len(rows), row_length - 1)
    ids, kind, earned = (torch.zeros(shape, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.float32))
    kept = torch.zeros(shape, dtype=torch.bool)
    for place, blocks in enumerate(rows):
        length = sum(len(block.ids) for block in blocks)
        for table, values in zip((ids, kind, earned), zip(*blocks, strict=True), strict=True):
            table[place, :length] = torch.tensor(list(chain.from_iterable(values)), dtype=table.dtype)
        kept[place, :length] = True
    begin, pad = begin_token(tokenizer), tokenizer.control.pad
    return stack_rows(ids, kept, kind, earned, begin=begin, pad=pad, row_length=row_length, loss_on=loss_on)


def read_blocks(row: TensorDictBase, template: BlockTemplate, tokenizer: Tokenizer) -> list[Block]:
    """The blocks of a row of :func:`pack_blocks`, batch size ``[]``; see there for an example.

    Raises:
        ValueError: the row holds something else.
    """
    real = row[TOKENS][row[ATTENTION_MASK]]
    return template.parse(tokenizer.decode(real[1:].tolist()))


def completion_rows(records: Sequence[TextHistory], tokenizer: Tokenizer, row_length: int) -> TensorDict:
    """One row for each record, ``[N]``, in the schema of this library: the prompt, then the completion.

    Records with ``query_tokens`` and ``response_tokens`` keep these ids, except that a row has control tokens of its
    own: an end of the action that was recorded is the agent's. In a run that records control tokens, such as those of
    :func:`~torchrl_lang.algorithm_distillation.run_records`, a response without it was cut off: its end is not the
    agent's.

    If all records have ``response_tokens`` and ``log_probs``, there is an entry ``token_log_prob``, float32 ``[N, T]``,
    zero elsewhere. Further entries are ``reward`` float32 ``[N, 1]``, that of the completion, and ``episode`` int64
    ``[N]``, the epoch.

    Raises:
        ValueError: a row does not fit, or a text cannot be encoded.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.algorithm_distillation.language import TextHistory, completion_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> record = TextHistory(query="a", response="bc", rewards=(0.5,), response_tokens=(1, 2), log_probs=(-1, -2))
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


def _turns(record: TextHistory, tokenizer: Tokenizer, is_marked: bool) -> list[Turn]:
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


def _log_probs(records: Sequence[TextHistory], agent_mask: Tensor) -> Tensor:
    """The log-probabilities of the completions' tokens, float32 ``[N, T]``; zero on an end that was not recorded."""
    out = torch.zeros(agent_mask.shape)
    first = agent_mask.long().argmax(-1).tolist()
    for place, record in enumerate(records):
        end = first[place] + len(record.log_probs)
        out[place, first[place] : end] = torch.tensor(record.log_probs)
    return out
