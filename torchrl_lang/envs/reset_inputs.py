"""Read and check what ``reset`` is given: entries and rows, in its tensordict or by keyword."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang.envs.row_state import Rows
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.schema import ROW_KEYS, ControlTokens, check_row, missing_entry
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.tokenizers import Tokenizer


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
    takes = [*known, *(ROW_KEYS if set_state else ())]
    if unknown := sorted(keywords.keys() - {*takes}):
        raise TypeError(f"{reset}() got {unknown}, it takes {takes} by name; rows only with set_state=True.")
    given = {key: torch.as_tensor(value, device=env.device) for key, value in keywords.items()}
    found = {**({} if tensordict is None else dict(tensordict.items())), **given}
    for key in {*known} & found.keys():
        shape, dtype = tuple(found[key].shape), found[key].dtype
        if shape not in (tuple(batch), (*batch, 1)) or dtype != torch.int64:
            raise ValueError(f"'{key}' must be int64 of shape {tuple(batch)}, one number per row, got {dtype} {shape}.")
    missing = [key for key in ROW_KEYS if key not in found]
    if set_state and missing:
        remedy = f"With transforms pass them by keyword: reset(set_state=True, **rows.select{ROW_KEYS})."
        raise missing_entry(f"{reset}(set_state=True)", missing, found, remedy)
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
    _match_order(rows, fresh, control)
    if isinstance(tokenizer, ChatTokenizer):
        prompt = torch.tensor(tokenizer.prompt_ids, device=tokens.device)
        place = rows.length[:, None] - len(prompt) + torch.arange(len(prompt), device=tokens.device)
        at_prompt = (tokens.gather(-1, place.clamp_min(0)) == prompt).all(-1) & (place >= 0).all(-1)
        refuse(fresh & ~at_prompt, "do not end with the generation prompt", "they have ended, or end inside a text")
    full = rows.length + action_length + 1 > row_length
    if max_turns is not None:
        full = full | (count_turns(rows, control) >= max_turns)
    refuse(fresh & full, "have no room or no turn left for another utterance", "reset them without set_state")
    return rows


def refuse(bad: Tensor, what: str, advice: str) -> None:
    """Raise ValueError if rows are ``bad``, bool ``[N]``."""
    if bad.any():
        raise ValueError(f"Rows {bad.nonzero().flatten().tolist()} cannot be continued, they {what}: {advice}.")


# The orders of tokens that environments write, by a letter for the role of each: s begin_state, r a text of the
# environment, z end_of_state, a begin_action, x tokens of the agent, e its end_of_action, c one of the environment,
# which it adds to an utterance without one, d end_of_dialogue, p padding. In chats texts may contain c.
_TURNS = re.compile(rb"(?:sr+z|a)(?:(?:x*e|x+c)(?:r+z)?)*")
_CHAT = re.compile(rb"(?:[rc]|x*e|x+c)*")
_ENDS = {
    rb"d": "it has ended: reset it without set_state",
    rb"x+": "it ends inside an utterance: finish it with end_of_action, or use TokenEnv",
    rb"sr*|r+": "it ends inside a text of the environment: finish it with end_of_state",
}


def _match_order(rows: Rows, fresh: Tensor, control: ControlTokens) -> None:
    """Raise unless environments could have written the ``fresh`` rows (bool ``[N]``) and would continue them."""
    tokens, agent = rows.tokens, rows.agent_mask
    roles = torch.full_like(tokens, ord("r"), dtype=torch.uint8)
    marks = {"c": control.end_of_action}
    if control.marks_turns:
        marks |= {"s": control.begin_state, "a": control.begin_action, "z": control.end_of_state}
        marks |= {"d": control.end_of_dialogue}
    for role, token in marks.items():
        roles = torch.where(tokens == token, ord(role), roles)
    roles = torch.where(agent, torch.where(tokens == control.end_of_action, ord("e"), ord("x")), roles)
    table = torch.where((tokens == control.pad) & (agent | control.marks_turns), ord("p"), roles).byte().cpu().numpy()
    for row, length in zip(fresh.nonzero().flatten().tolist(), rows.length[fresh].tolist(), strict=True):
        order = table[row, :length].tobytes()
        turns = (_TURNS if control.marks_turns else _CHAT).match(order)
        position = turns.end() if turns else 0
        if position < length:
            other = f"at position {position} it has an order of tokens that no environment writes"
            found = (end for pattern, end in _ENDS.items() if re.fullmatch(pattern, order[position:]))
            raise ValueError(f"Row {row} cannot be continued: {next(found, other)}.")
