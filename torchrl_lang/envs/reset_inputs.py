"""Read and check what ``reset`` is given: entries and rows, in its tensordict or by keyword."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang._files import shorten
from torchrl_lang.envs.row_state import Rows
from torchrl_lang.functional.decisions import utterance_ends
from torchrl_lang.schema import ROW_KEYS, ControlTokens, check_row, missing_entry, refuse
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


def in_range(name: str, value: Tensor, fresh: Tensor, below: int) -> Tensor:
    """``value``, int64 ``[N]``, where ``fresh`` (bool ``[N]``), 0 elsewhere; all of it must lie in ``[0, below)``."""
    value = torch.where(fresh, value, 0)
    if ((value < 0) | (value >= below)).any():
        raise ValueError(f"{name} must lie in [0, {below}), got {shorten(value.tolist())}.")
    return value


def count_turns(rows: Rows, control: ControlTokens) -> Tensor:
    """Number of utterances of each row, int64 ``[N]``: each has one end-of-action token."""
    return utterance_ends(rows.tokens, rows.attention_mask, rows.agent_mask, control.end_of_action).sum(-1)


def shortest_opening(tokenizer: Tokenizer) -> int:
    """Number of tokens before the first utterance if the agent takes the first turn."""
    return len(tokenizer.encode_opening("")) if isinstance(tokenizer, ChatTokenizer) else 1


def rows_to_continue(env: Any, options: TensorDictBase, fresh: Tensor) -> Rows:
    """The transcripts in a reset tensordict of a ``LanguageEnv``.

    ``options`` is flattened to ``[N]``; its rows are checked where ``fresh``, bool ``[N]``.

    Raises:
        ValueError: a row is malformed, has another width, has ended, has no room or turn left, or ends inside an
            utterance or a reply.
    """
    tokenizer, row_length = env.tokenizer, env.row_length
    check_row(options, vocab_size=tokenizer.vocab_size)
    tokens, attention, action, reward = (options.get(key) for key in ROW_KEYS)
    if tokens.shape[-1] != row_length:
        raise ValueError(f"Rows have width {tokens.shape[-1]}, but this environment's row_length is {row_length}.")
    control = tokenizer.control
    tokens = torch.where(attention, tokens.to(torch.int64), control.pad)
    rows = Rows(tokens, action.clone(), reward.clone(), attention.sum(-1))
    full = rows.length + env.action_length + 1 > row_length
    if env.max_turns is not None:
        full = full | (count_turns(rows, control) >= env.max_turns)
    faults = _faults_of_order(rows, control)
    if isinstance(tokenizer, ChatTokenizer):
        prompt = torch.tensor(tokenizer.prompt_ids, device=tokens.device)
        place = rows.length[:, None] - len(prompt) + torch.arange(len(prompt), device=tokens.device)
        at_prompt = (tokens.gather(-1, place.clamp_min(0)) == prompt).all(-1) & (place >= 0).all(-1)
        faults.append((~at_prompt, "no generation prompt at its end: it has ended, or ends inside a text"))
    faults.append((full, "no room or no turn left for another utterance: reset it without set_state"))
    refuse_rows(rows.tokens, fresh, faults)
    return rows


def refuse_rows(tokens: Tensor, fresh: Tensor, faults: Sequence[tuple[Tensor, str]]) -> None:
    """Raise ValueError if a ``fresh`` row has one of the faults, bool ``[N]``, and describe the first."""
    refuse(tokens, [((fresh & has)[:, None], text) for has, text in faults], tokens)


# The roles of tokens in rows, and those that may follow each in what environments write: ^ the beginning of the row,
# s begin_state, r a text of the environment, z end_of_state, a begin_action, x tokens of the agent, e its
# end_of_action, c one of the environment, which it adds to an utterance without one, d end_of_dialogue, p padding. In
# chats texts may contain c.
_ROLES = "^srzaxecdp"
_FOLLOW = {"^": "sa", "s": "r", "r": "rz", "z": "xe", "a": "xe", "x": "xec", "e": "xer", "c": "xer"}
_FOLLOW_IN_CHATS = {"x": "xec", **dict.fromkeys("^rec", "rxec")}


def _faults_of_order(rows: Rows, control: ControlTokens) -> list[tuple[Tensor, str]]:
    """Find rows, bool ``[N]``, that environments could not have written or would not continue, and what they have."""
    tokens, agent, at = rows.tokens, rows.agent_mask, _ROLES.index
    roles = torch.full_like(tokens, at("r"))
    marks = {"c": control.end_of_action}
    if control.marks_turns:
        marks |= {"s": control.begin_state, "a": control.begin_action, "z": control.end_of_state}
        marks |= {"d": control.end_of_dialogue}
    for role, token in marks.items():
        roles = torch.where(tokens == token, at(role), roles)
    roles = torch.where(agent, torch.where(tokens == control.end_of_action, at("e"), at("x")), roles)
    roles = torch.where((tokens == control.pad) & (agent | control.marks_turns), at("p"), roles)
    follow = torch.zeros(len(_ROLES), len(_ROLES), dtype=torch.bool, device=tokens.device)
    for role, following in (_FOLLOW if control.marks_turns else _FOLLOW_IN_CHATS).items():
        follow[at(role), [at(each) for each in following]] = True
    before = torch.nn.functional.pad(roles[:, :-1], (1, 0), value=at("^"))
    wrong = (rows.attention_mask & ~follow[before, roles]).any(-1)
    last = roles.gather(-1, (rows.length - 1).clamp_min(0)[:, None]).squeeze(-1)
    in_text = (last == at("s")) | (last == at("r")) & control.marks_turns
    return [
        (rows.length == 0, "no token: a row begins with begin_state or begin_action"),
        (last == at("d"), "ended: reset it without set_state"),
        (last == at("x"), "no end of its last utterance: finish it with end_of_action, or use TokenEnv"),
        (in_text, "no end of its last text of the environment: finish it with end_of_state"),
        (wrong, "an order of tokens that no environment writes"),
    ]
