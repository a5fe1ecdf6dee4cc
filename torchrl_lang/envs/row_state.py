"""The tensors of a turn, in the order of a step: utterances, replies, and the rows that they are appended to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.schema import ACTION, ControlTokens, find_entry


class Utterance(NamedTuple):
    """The agent's utterances, read from a batch of actions."""

    tokens: Tensor
    """int64 ``[N, K]``, as passed."""
    length: Tensor
    """int64 ``[N]``: number of tokens before the end of the action."""
    closed: Tensor
    """bool ``[N]``: the agent wrote the end-of-action token."""


def read_utterance(action: Tensor, control: ControlTokens) -> Utterance:
    """Find where each action of ``int64 [N, K]`` ends: at its first end-of-action token, first padding, or ``K``.

    Tokens after the end are ignored. An action without tokens is treated as a single end-of-action token, because its
    reward needs a token of the agent.
    """
    is_end = action == control.end_of_action
    stops = is_end | (action == control.pad)
    place = torch.arange(action.shape[-1], device=action.device)
    # min, because amin takes ten times as long for int64 on a CPU.
    length = torch.where(stops, place, action.shape[-1]).min(-1).values
    at_stop = is_end.gather(-1, length.clamp_max(action.shape[-1] - 1)[:, None])[:, 0]
    closed = at_stop | (length == 0)
    return Utterance(action, length, closed)


class Reply(NamedTuple):
    """The environment's reply to a batch of utterances.

    Plain text only, to which the base class adds the control tokens; with a :class:`~torchrl_lang.text.ChatTokenizer`
    everything from the end of the utterance to the next one, by ``tokenizer.encode_reply``.
    """

    tokens: Tensor
    """int64 ``[N, R]``, right-padded."""
    length: Tensor
    """int64 ``[N]``: zero if the environment writes nothing."""
    reward: Tensor
    """float32 ``[N]``: the reward of the turn."""
    terminated: Tensor
    """bool ``[N]``: the task has terminated."""
    truncated: Tensor | None = None
    """bool ``[N]``: the task truncates the episode; None if only the limits of turns and of the row do."""


class Rows(NamedTuple):
    """A batch of transcripts, right-padded."""

    tokens: Tensor
    """int64 ``[N, T]``."""
    agent_mask: Tensor
    """bool ``[N, T]``."""
    token_reward: Tensor
    """float32 ``[N, T]``."""
    length: Tensor
    """int64 ``[N]``: number of real tokens of each row."""

    @property
    def attention_mask(self) -> Tensor:
        """True on real tokens, ``bool [N, T]``."""
        # Each row of the mask is a window of this vector; on a CPU that is eight times as fast as comparing.
        width = self.tokens.shape[-1]
        mask = torch.arange(2 * width, device=self.tokens.device) < width
        return mask.unfold(0, width, 1).index_select(0, width - self.length)


def first_rows(opening: Tensor, length: Tensor, control: ControlTokens, row_length: int, action_length: int) -> Rows:
    """Rows of minimal width that begin with the environment's opening, or with the agent's turn if it is empty.

    ``opening`` is int64 ``[N, R]`` with ``length`` tokens, int64 ``[N]``, and must leave room for an utterance.
    """
    if opening.shape[-1] + 2 * control.marks_turns + action_length + 1 > row_length and opening.shape[-1]:
        raise ValueError(f"An opening of {opening.shape[-1]} tokens leaves no room for an utterance in {row_length}.")
    if not control.marks_turns:
        none = torch.zeros_like(opening, dtype=torch.float32)
        return Rows(opening, none.to(torch.bool), none, length)
    has_opening = length > 0
    first = torch.where(has_opening, control.begin_state, control.begin_action)[:, None]
    place = torch.arange(opening.shape[-1] + 1, device=opening.device)
    ends = (place == length[:, None]) & has_opening[:, None]
    text = torch.where(place < length[:, None], torch.cat([opening, first], -1), control.pad)
    head = torch.cat([first, torch.where(ends, control.end_of_state, text)], -1)
    none = torch.zeros((1, 1), dtype=torch.float32, device=head.device).expand_as(head)
    return Rows(head, none.to(torch.bool), none, 1 + torch.where(has_opening, length + 1, 0))


def complete_opening(text: list[int], control: ControlTokens) -> list[int]:
    """The tokens of one row before its first utterance, for an opening as tasks return it."""
    if not control.marks_turns:
        return text
    return [control.begin_state, *text, control.end_of_state] if text else [control.begin_action]


def complete_reply(text: list[int], terminated: bool, control: ControlTokens) -> list[int]:
    """The tokens of one row after the end of an utterance, for a reply as tasks return it."""
    if not control.marks_turns:
        return text
    return [*text, *[control.end_of_state] * bool(text), *[control.end_of_dialogue] * terminated]


class Writes(NamedTuple):
    """Tokens and places that a turn writes to growing rows, computed before the rows are touched."""

    place: Tensor
    """int64 ``[N, C]``: the column of each token; a spare column for tokens that are not kept or do not fit."""
    tokens: Tensor
    """int64 ``[N, C]``."""
    agent: Tensor
    """bool ``[N, A]``: True on the agent's tokens among the first ``A``; the others are the environment's."""
    reward_place: Tensor
    """int64 ``[N, 1]``: the column of the agent's last token."""
    reward: Tensor
    """float32 ``[N, 1]``."""
    length: Tensor
    """int64 ``[N]``: the new lengths of the rows."""


class GrowingRows:
    """A batch of transcripts that grow in place: a turn writes its own tokens and copies nothing else.

    Args:
        rows: the transcripts, which may be narrower than ``width``; they are copied.
        width: ``T``.
        control: the control tokens.
    """

    def __init__(self, rows: Rows, width: int, control: ControlTokens) -> None:
        # The spare column after each row is written and never read.
        self._fill, self.width, self._control = (control.pad, False, 0.0), width, control
        self._wide = tuple(
            torch.nn.functional.pad(entry, (0, width + 1 - entry.shape[1]), value=fill)
            for entry, fill in zip(rows[:3], self._fill, strict=True)
        )
        self._length = rows.length.clone()

    @property
    def rows(self) -> Rows:
        """The rows as a view of this memory; copy them to keep them."""
        tokens, agent_mask, token_reward = (entry[:, :-1] for entry in self._wide)
        return Rows(tokens, agent_mask, token_reward, self._length)

    def at(self, index: Tensor) -> Rows:
        """A copy of the rows ``index``, int64 ``[M]``."""
        return Rows(*(entry.index_select(0, index) for entry in self.rows))

    def replace_(self, mask: Tensor, rows: Rows) -> None:
        """Replace the rows where ``mask``, bool ``[N]``, by others, which may be narrower."""
        self._length = torch.where(mask, rows.length, self._length)
        index = mask.nonzero()[:, 0]
        for mine, given, fill in zip(self._wide, rows[:3], self._fill, strict=True):
            mine.index_fill_(0, index, fill)
            mine[:, : given.shape[1]].index_copy_(0, index, given.index_select(0, index))

    def plan_turn(self, utterance: Utterance, reply: Reply, live: Tensor) -> tuple[Writes, Tensor]:
        """Plan to append the utterance, the reply, their end tokens and the end of the dialogue to the ``live`` rows.

        In rows of a chat template the reply is complete, so only the utterance gets its end token.

        Returns:
            What to write, and where tokens do not fit, bool ``[N]``.
        """
        like, control, width = utterance.length[:, None], self._control, self.width
        uttered, replied = torch.where(live, utterance.length, 0), torch.where(live, reply.length, 0)
        end = torch.full_like(like, control.end_of_action)
        parts = [(utterance.tokens, uttered), (end, live), (reply.tokens, replied)]
        if control.marks_turns:
            parts.append((torch.full_like(like, control.end_of_state), replied > 0))
            parts.append((torch.full_like(like, control.end_of_dialogue), live & reply.terminated))
        place, wanted = [], self._length
        for tokens, number in parts:  # the first ``number`` tokens of each
            column = torch.arange(tokens.shape[-1], device=tokens.device)
            place.append(torch.where(column < number[:, None], wanted[:, None] + column, width))
            wanted = wanted + number
        # The end-of-action token belongs to the agent if it wrote it; the reply is never the agent's.
        agent = torch.cat([torch.ones_like(utterance.tokens, dtype=torch.bool), utterance.closed[:, None]], -1)
        reward_place = torch.where(live, self._length + uttered + utterance.closed - 1, width).clamp_max(width)
        places, tokens = torch.cat(place, -1).clamp_max_(width), torch.cat([tokens for tokens, _ in parts], -1)
        length = wanted.clamp_max(width)
        return Writes(places, tokens, agent, reward_place[:, None], reply.reward[:, None], length), wanted > width

    def write_(self, writes: Writes) -> None:
        """Write what :meth:`plan_turn` planned."""
        tokens, agent_mask, token_reward = self._wide
        tokens.scatter_(-1, writes.place, writes.tokens)
        agent_mask.scatter_(-1, writes.place[:, : writes.agent.shape[-1]], writes.agent)
        token_reward.scatter_(-1, writes.reward_place, writes.reward)
        self._length = writes.length


def where_rows(mask: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Our rows where ``mask`` (bool ``[N]``), their rows elsewhere; tensors ``[N, ...]``."""
    if ours.ndim > 1 and ours.element_size() == 1:
        # On a CPU copying whole rows of bytes is four times as fast as torch.where on bytes.
        row = torch.arange(mask.shape[0], device=mask.device)
        return torch.cat([ours, theirs]).index_select(0, torch.where(mask, row, row + mask.shape[0]))
    return torch.where(mask.reshape(-1, *[1] * (ours.ndim - 1)), ours, theirs)


def read_mask(key: str, tensordict: TensorDictBase | None, n: int) -> Tensor | None:
    """The mask over rows ``"_reset"`` or ``"_step"``, bool ``[N]``; None without one."""
    mask = None if tensordict is None else tensordict.get(key, None)
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.numel() != n:
        raise ValueError(f"'{key}' must be {n} bool flags, one per row, got {mask.dtype} {tuple(mask.shape)}.")
    return mask.reshape(n)


def read_action(what: str, tensordict: TensorDictBase, shape: tuple[int, ...], ids: str = "token ids") -> Tensor:
    """The entry ``action``, int64 ``ids`` of ``shape``, which ``what`` needs."""
    action = find_entry(what, ACTION, "Let a policy write it, or env.rand_action().", tensordict)
    if action.shape != shape or action.dtype != torch.int64:
        got = f"{action.dtype} of shape {tuple(action.shape)}"
        raise ValueError(f"{what} expects 'action' as int64 {ids} of shape {shape}, got {got}.")
    return action
