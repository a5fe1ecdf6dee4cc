"""Read and check what ``reset`` is given: entries and rows, in its tensordict or by keyword."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang.envs.row_state import Rows
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.schema import ROW_KEYS, ControlTokens, check_row, missing_entry
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["count_turns", "merge_keywords", "refuse", "rows_to_continue", "shortest_opening"]


def merge_keywords(
    env: EnvBase,
    known: Sequence[str],
    tensordict: TensorDictBase | None,
    keywords: Mapping[str, Any],
    *,
    set_state: bool,
) -> TensorDictBase | None:
    """The tensordict of ``reset`` with the rows, and the ``known`` entries, that were passed by keyword.

    Raises:
        TypeError: a keyword is unknown, or rows are passed by keyword without ``set_state=True``.
        ValueError: a known entry has another dtype or shape.
        KeyError: with ``set_state=True`` an entry of the rows is missing.
    """
    reset, batch = f"{type(env).__name__}.reset", env.batch_size
    unknown = sorted(keywords.keys() - {*known, *ROW_KEYS})
    if unknown:
        takes = f"the entries {list(known)} by name" if known else "no entries by name"
        raise TypeError(f"{reset}() got {unknown}, it takes {takes} (and set_state).")
    rows = [key for key in ROW_KEYS if key in keywords]
    if rows and not set_state:
        raise TypeError(
            f"{reset}() got the rows {rows} by keyword without set_state=True: add it to continue from these rows, or "
            f"omit them to begin new episodes."
        )
    given = {key: torch.as_tensor(value, device=env.device) for key, value in keywords.items()}
    found = {**({} if tensordict is None else dict(tensordict.items())), **given}
    for key in {*known} & found.keys():
        value = found[key]
        if value.shape not in (batch, (*batch, 1)) or value.dtype != torch.int64:
            raise ValueError(
                f"'{key}' must be int64 of shape {tuple(batch)}, one number per row, got {value.dtype} of shape "
                f"{tuple(value.shape)}."
            )
    missing = [key for key in ROW_KEYS if key not in found]
    if set_state and missing:
        raise missing_entry(
            f"{reset}(set_state=True)",
            missing,
            found,
            "TransformedEnv removes such entries from the tensordict: with transforms pass them by keyword, "
            f"reset(set_state=True, **rows.select{ROW_KEYS}).",
        )
    return TensorDict(found, batch, device=env.device) if given else tensordict


def count_turns(rows: Rows, control: ControlTokens) -> Tensor:
    """Number of utterances of each row, int64 ``[N]``: each has one end-of-action token."""
    return utterance_ends(rows.tokens, rows.attention_mask, rows.agent_mask, control.end_of_action).sum(-1)


def shortest_opening(tokenizer: Tokenizer) -> int:
    """Number of tokens before the first utterance if the agent takes the first turn."""
    return len(tokenizer.encode_opening("")) if isinstance(tokenizer, ChatTokenizer) else 1


def rows_to_continue(
    options: TensorDictBase,
    fresh: Tensor,
    tokenizer: Tokenizer,
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
    refuse(fresh & (rows.length == 0), "are empty", "a row begins with begin_state or begin_action")
    full = rows.length + action_length + 1 > row_length
    if max_turns is not None:
        full = full | (count_turns(rows, control) >= max_turns)
    if isinstance(tokenizer, ChatTokenizer):
        _check_chat(rows, fresh, tokenizer)
        refuse(fresh & full, "have no room or no turn left for another utterance", "reset them without set_state")
        return rows
    kinds = _token_kinds(rows, control)
    _check_order(rows, kinds, fresh)
    last = kinds.gather(-1, (rows.length - 1).clamp_min(0)[:, None]).squeeze(-1)
    in_reply = (last == _Kind.REPLY) | (last == _Kind.BEGIN_STATE)
    refuse(fresh & (last == _Kind.END_OF_DIALOGUE), "have ended", "reset them without set_state")
    refuse(fresh & full, "have no room or no turn left for another utterance", "reset them without set_state")
    refuse(fresh & (last == _Kind.ACTION), "end inside an utterance", "finish it with end_of_action, or use TokenEnv")
    refuse(fresh & in_reply, "end inside a text of the environment", "finish it with end_of_state")
    return rows


def _check_chat(rows: Rows, fresh: Tensor, tokenizer: ChatTokenizer) -> None:
    """Raise unless the ``fresh`` rows have ended utterances only, and end where the agent writes."""
    tokens, agent = rows.tokens, rows.agent_mask
    ends = utterance_ends(tokens, rows.attention_mask, agent, tokenizer.control.end_of_action)
    unfinished = agent & ~ends & ~shift_left(agent | ends)
    inside = agent & (tokens == tokenizer.control.pad)
    refuse(fresh & unfinished.any(-1), "have utterances without end", "finish them with end_of_action, or use TokenEnv")
    refuse(fresh & inside.any(-1), "have padding inside an utterance", "pass rows as reset and step return them")
    prompt = torch.tensor(tokenizer.prompt_ids, device=tokens.device)
    place = rows.length[:, None] - len(prompt) + torch.arange(len(prompt), device=tokens.device)
    at_prompt = (tokens.gather(-1, place.clamp_min(0)) == prompt).all(-1) & (place >= 0).all(-1)
    refuse(fresh & ~at_prompt, "do not end with the generation prompt", "they have ended, or end inside a text")


def refuse(bad: Tensor, what: str, advice: str) -> None:
    """Raise ValueError if rows are ``bad``, bool ``[N]``."""
    if bad.any():
        raise ValueError(f"Rows {bad.nonzero().flatten().tolist()} cannot be continued, they {what}: {advice}.")


# -- the valid orders of tokens, to reject damaged rows ----------------------------------------------------------------


class _Kind(IntEnum):
    """The role of a token in a row."""

    BEGIN_STATE = 0
    BEGIN_ACTION = 1
    ACTION = 2
    """A token of the agent other than its end of action."""
    END_OF_ACTION = 3
    """An end of action that the agent wrote."""
    CLOSED = 4
    """An end of action that the environment added to an utterance without one."""
    REPLY = 5
    """A token of the environment's text."""
    END_OF_STATE = 6
    END_OF_DIALOGUE = 7
    PADDING = 8
    """A padding token among the real ones, which is always an error."""


_AGENT = (_Kind.ACTION, _Kind.END_OF_ACTION)
_AFTER_TURN = (*_AGENT, _Kind.REPLY, _Kind.END_OF_DIALOGUE)  # the environment's reply may be empty
_FOLLOWERS = {  # nothing follows the others
    _Kind.BEGIN_STATE: (_Kind.REPLY,),
    _Kind.BEGIN_ACTION: _AGENT,
    _Kind.ACTION: (*_AGENT, _Kind.CLOSED),
    _Kind.END_OF_ACTION: _AFTER_TURN,
    _Kind.CLOSED: _AFTER_TURN,
    _Kind.REPLY: (_Kind.REPLY, _Kind.END_OF_STATE),
    _Kind.END_OF_STATE: (*_AGENT, _Kind.END_OF_DIALOGUE),
}


def _token_kinds(rows: Rows, control: ControlTokens) -> Tensor:
    """The :class:`_Kind` of every token, int64 ``[N, T]``; undefined after a row's end."""
    own = torch.full_like(rows.tokens, _Kind.REPLY)
    agent = torch.full_like(rows.tokens, _Kind.ACTION)
    agent = torch.where(rows.tokens == control.end_of_action, int(_Kind.END_OF_ACTION), agent)
    for token, kind in (
        (control.begin_state, _Kind.BEGIN_STATE),
        (control.begin_action, _Kind.BEGIN_ACTION),
        (control.end_of_action, _Kind.CLOSED),
        (control.end_of_state, _Kind.END_OF_STATE),
        (control.end_of_dialogue, _Kind.END_OF_DIALOGUE),
    ):
        own = torch.where(rows.tokens == token, int(kind), own)
    kinds = torch.where(rows.agent_mask, agent, own)
    return torch.where(rows.tokens == control.pad, int(_Kind.PADDING), kinds)


def _check_order(rows: Rows, kinds: Tensor, fresh: Tensor) -> None:
    """Raise unless environments could have written the ``fresh`` rows (bool ``[N]``, none of them empty)."""
    n = len(_Kind)
    allowed = torch.zeros((n, n), dtype=torch.bool, device=kinds.device)
    for kind, followers in _FOLLOWERS.items():
        allowed[kind, list(followers)] = True
    begins = kinds[:, :1] <= _Kind.BEGIN_ACTION
    follows = allowed[kinds[:, :-1], kinds[:, 1:]]
    bad = rows.attention_mask & fresh[:, None] & ~torch.cat([begins, follows], -1)
    if bad.any():
        row, position = bad.nonzero()[0].tolist()
        part = _Kind(int(kinds[row, position])).name
        where = f"after {_Kind(int(kinds[row, position - 1])).name}" if position else "at its beginning"
        raise ValueError(
            f"Row {row} cannot be continued: at position {position} it has {part} {where}, an order that no "
            f"environment writes. Pass rows as reset and step return them."
        )
