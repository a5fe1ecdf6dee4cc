"""Read and check the rows of ``reset(tensordict, set_state=True)``, from which episodes continue."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.envs.row_grammar import TokenKind, check_order, token_kinds
from torchrl_lang.envs.row_state import Rows
from torchrl_lang.schema import ROW_KEYS, ControlTokens, check_row

__all__ = ["count_turns", "rows_to_continue"]


def count_turns(rows: Rows, control: ControlTokens) -> Tensor:
    """Number of utterances of each row, int64 ``[N]``: each has one end-of-action token."""
    return ((rows.tokens == control.end_of_action) & rows.attention_mask).sum(-1)


def rows_to_continue(
    options: TensorDictBase,
    fresh: Tensor,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    action_length: int,
    max_turns: int | None,
) -> Rows:
    """The transcripts in a flattened (``[N]``) reset tensordict, checked where ``fresh`` (bool ``[N]``).

    Raises:
        ValueError: a row is malformed, has another width, has ended, has no room or turn left, or ends inside an
            utterance or a reply.
    """
    check_row(options, vocab_size=tokenizer.vocab_size)
    tokens, attention, action, reward = (options.get(key) for key in ROW_KEYS)
    if tokens.shape[-1] != row_length:
        raise ValueError(f"Rows have width {tokens.shape[-1]}, but this environment's row_length is {row_length}.")
    control = tokenizer.control
    tokens = torch.where(attention, tokens.to(torch.int64), control.pad)
    rows = Rows(tokens, action.clone(), reward.clone(), attention.sum(-1))
    _refuse(fresh & (rows.length == 0), "are empty", "a row begins with begin_state or begin_action")
    kinds = token_kinds(rows, control)
    check_order(rows, kinds, fresh)
    full = rows.length + action_length + 1 > row_length
    if max_turns is not None:
        full = full | (count_turns(rows, control) >= max_turns)
    last = kinds.gather(-1, (rows.length - 1).clamp_min(0)[:, None]).squeeze(-1)
    in_reply = (last == TokenKind.REPLY) | (last == TokenKind.BEGIN_STATE)
    _refuse(fresh & (last == TokenKind.END_OF_DIALOGUE), "have ended", "reset them without set_state")
    _refuse(fresh & full, "have no room or no turn left for another utterance", "reset them without set_state")
    _refuse(
        fresh & (last == TokenKind.ACTION), "end inside an utterance", "finish it with end_of_action, or use TokenEnv"
    )
    _refuse(fresh & in_reply, "end inside a text of the environment", "finish it with end_of_state")
    return rows


def _refuse(bad: Tensor, what: str, advice: str) -> None:
    if bad.any():
        raise ValueError(f"Rows {bad.nonzero().flatten().tolist()} cannot be continued, they {what}: {advice}.")
