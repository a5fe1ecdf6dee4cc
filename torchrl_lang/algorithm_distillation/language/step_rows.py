"""Rows of windows of learning histories, for losses and models of this library, and their tokenizer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.algorithm_distillation.language.template import (
    Slot,
    StepTemplate,
    TokenKind,
    end_index,
    entry_values,
    has_no_reward,
    steps_to_words,
)
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, REWARD, TOKEN_REWARD, TOKENS, entry
from torchrl_lang.text import CharTokenizer, Tokenizer

__all__ = ["TOKEN_KIND", "LossOn", "StepRows", "StepTokens", "begin_token", "stack_rows", "template_tokenizer"]

TOKEN_KIND = "token_kind"
"""int64 ``[*B, T]``: what each token of a row describes, a :class:`TokenKind`."""

LossOn = Literal["actions", "all"]
"""Which tokens ``agent_mask`` names, and losses train on: actions (completions), or all but the first of a row."""

Part = Literal["state", "action", "outcome"]
"""Part of a step: all before its action, the action, or all after it."""


class Tokens(NamedTuple):
    """Tokens of steps, some of which are left out."""

    ids: Tensor
    """int64 ``[*B, W]``."""
    kept: Tensor
    """bool ``[*B, W]``: False where a step has no such token."""
    kind: Tensor
    """int64 ``[W]``: a :class:`TokenKind`."""


def template_tokenizer(template: StepTemplate) -> CharTokenizer:
    """A tokenizer of the words of a template: one token for each word, or for each character of a decimal number.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepTemplate, template_tokenizer
        >>> moves = Quantizer(range(2), ["west", "east"])
        >>> template = StepTemplate("spelled", [Quantizer(range(5))], moves, Quantizer([0, 1]))
        >>> tokenizer = template_tokenizer(template)
        >>> tokenizer.decode(tokenizer.encode(" at 3 go east got 0")), len(tokenizer.encode(" at 3 go east got 0"))
        (' at 3 go east got 0', 6)
    """
    return CharTokenizer.from_alphabet(template.vocabulary())


class _Table(NamedTuple):
    """The tokens of each word that a slot may hold, and of nothing in the last row."""

    ids: Tensor
    """int64 ``[words + 1, P]``."""
    kept: Tensor
    """bool ``[words + 1, P]``."""


class StepTokens:
    """Encodes steps with a tokenizer: a table for each slot of the template maps numbers to tokens.

    A word may have several tokens, as in a pretrained tokenizer. The tokens are those of the steps' text: each word is
    encoded with the space before it.

    Args:
        template: a template whose quantizers all have finitely many words.
        tokenizer: encodes the words.

    Raises:
        ValueError: a quantizer has no finite number of words, or the tokenizer cannot encode a word.
    """

    def __init__(self, template: StepTemplate, tokenizer: Tokenizer) -> None:
        if not template.is_finite:
            raise ValueError("The template has decimals, expected quantizers with finitely many words.")
        self.template, self.tokenizer = template, tokenizer
        self._tables = [_table(slot, tokenizer) for slot in template.slots]
        actions = [place for place, slot in enumerate(template.slots) if slot.kind == TokenKind.ACTION]
        self._places = {
            "state": range(actions[0]),
            "action": range(actions[0], actions[-1] + 1),
            "outcome": range(actions[-1] + 1, len(template.slots)),
        }

    @property
    def longest_step(self) -> int:
        """The largest number of tokens of a step."""
        return sum(int(table.kept.sum(-1).max()) for table in self._tables)

    def words(self, kind: TokenKind) -> list[Tensor]:
        """The tokens of the words of each slot of a kind, int64 ``[words]``.

        Raises:
            ValueError: a word has several tokens.
        """
        found = []
        for slot, table in zip(self.template.slots, self._tables, strict=True):
            if slot.kind == kind:
                if (table.kept[:-1].sum(-1) != 1).any():
                    raise ValueError(
                        f"A word of the {kind.name.lower()} is several tokens: use template_tokenizer(template)."
                    )
                found.append(table.ids[:-1, 0])
        return found

    def encode(self, steps: TensorDictBase, *parts: Part) -> Tokens:
        """The tokens of parts of steps ``[*B]``, by default of whole steps; only the entries of the parts are read.

        Raises:
            KeyError, ValueError: an entry is missing or has another shape, or a number has no word.
        """
        places = [place for part in parts or ("state", "action", "outcome") for place in self._places[part]]
        ids, kept, kind = [], [], []
        for place in places:
            slot, table = self.template.slots[place], self._tables[place]
            index = self._index(slot, steps, len(table.ids) - 1).cpu()
            ids.append(table.ids[index])
            kept.append(table.kept[index])
            kind += [int(slot.kind)] * table.ids.shape[-1]
        return Tokens(torch.cat(ids, -1), torch.cat(kept, -1), torch.tensor(kind))

    def _index(self, slot: Slot, steps: TensorDictBase, nothing: int) -> Tensor:
        """The row of a slot's table for each step, int64 ``[*B]``."""
        index = torch.zeros(steps.batch_size, dtype=torch.int64, device=steps.device)
        if slot.quantizer is not None:
            index = slot.quantizer.index(entry_values(steps, self.template, slot))
        if len(slot.words) > 1:
            index = index * len(slot.words) + end_index(steps)
        if slot.optional:
            index = torch.where(has_no_reward(steps, self.template), nothing, index)
        return index


def _table(slot: Slot, tokenizer: Tokenizer) -> _Table:
    """The words of a slot in the order of their numbers, each with its ends, and their tokens."""
    numbers = slot.quantizer.words if slot.quantizer is not None else ("",)
    words = [number + end for number in numbers for end in slot.words]
    encoded = [tokenizer.encode(f" {word}") if word else [] for word in [*words, ""]]
    width = max(map(len, encoded))
    ids = torch.zeros(len(encoded), width, dtype=torch.int64)
    kept = torch.zeros(len(encoded), width, dtype=torch.bool)
    for place, tokens in enumerate(encoded):
        ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        kept[place, : len(tokens)] = True
    return _Table(ids, kept)


class StepRows:
    """Writes windows of steps as rows: a control token, then the words of the steps in order.

    ``agent_mask`` is True on the tokens of actions, so that :class:`~torchrl_lang.objectives.BCLoss` trains on them
    alone; the last token of each action has the step's ``token_reward``. With ``loss_on="all"`` it is True on all real
    tokens but the first, which trains the same as ``BCLoss(transition_weight=1)``.

    Templates without decimals are encoded by tables of tokens, without a loop over steps.

    Args:
        template: how steps are written.
        tokenizer: has control tokens; :func:`template_tokenizer` makes one.
        loss_on: "actions" or "all".

    Raises:
        ValueError: ``loss_on`` is unknown, or the tokenizer has no token that begins a row.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import LearningHistory
        >>> from torchrl_lang.algorithm_distillation.language import Quantizer, StepRows, StepTemplate
        >>> from torchrl_lang.algorithm_distillation.language import template_tokenizer
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 10)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> cells, moves = Quantizer(range(3)), Quantizer(range(5), ["stay", "north", "south", "west", "east"])
        >>> template = StepTemplate("compact", [cells, cells], moves, Quantizer([0, 1]))
        >>> tokenizer = template_tokenizer(template)
        >>> rows = StepRows(template, tokenizer)(history.steps[0])
        >>> rows["tokens"].shape
        torch.Size([4, 41])
        >>> tokenizer.decode(rows["tokens"][0, :9])
        '<s> 1 1 ... 0'
    """

    def __init__(self, template: StepTemplate, tokenizer: Tokenizer, *, loss_on: LossOn = "actions") -> None:
        check_options(loss_on=(loss_on, ("actions", "all")))
        self.template, self.tokenizer, self.loss_on = template, tokenizer, loss_on
        self.begin = begin_token(tokenizer)
        self.tokens = StepTokens(template, tokenizer) if template.is_finite else None

    def __call__(self, windows: TensorDictBase, row_length: int | None = None) -> TensorDict:
        """The rows ``[N]`` of windows ``[N, L]``.

        Args:
            windows: successive steps, in the entries of a
            :class:`~torchrl_lang.algorithm_distillation.LearningHistory`.
            row_length: ``T``; by default room for ``L`` of the longest steps, or the longest row with decimals.

        Raises:
            KeyError: an entry is missing.
            ValueError: a row does not fit, or a number has no word.
        """
        if self.tokens is None:
            return self.from_text(windows, row_length)
        tokens = self.tokens.encode(windows)
        row_length = 1 + windows.shape[1] * self.tokens.longest_step if row_length is None else row_length
        return self._rows(tokens, entry(windows, REWARD).squeeze(-1), row_length)

    def from_text(self, windows: TensorDictBase, row_length: int | None = None) -> TensorDict:
        """The same rows, word by word: slower, and for all templates."""
        steps = [
            [(id, kind) for word, kind in step for id in self.tokenizer.encode(f" {word}")]
            for window in windows
            for step in steps_to_words(window, self.template)
        ]
        width = max(map(len, steps))
        shape = (len(steps), width)
        ids, kept, kind = (torch.zeros(shape, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.int64))
        for place, step in enumerate(steps):
            ids[place, : len(step)], kind[place, : len(step)] = torch.tensor(step).T
            kept[place, : len(step)] = True
        split = (*windows.shape, width)
        tokens = Tokens(ids.view(split), kept.view(split), kind.view(split))
        longest = 1 + int(kept.view(*windows.shape, -1).sum((-2, -1)).max())
        row_length = longest if row_length is None else row_length
        return self._rows(tokens, entry(windows, REWARD).squeeze(-1), row_length)

    def _rows(self, tokens: Tokens, reward: Tensor, row_length: int) -> TensorDict:
        """Rows of the tokens ``[N, L, W]`` of steps with rewards ``[N, L]``."""
        kind = tokens.kind.expand_as(tokens.ids)
        is_action = tokens.kept & (kind == TokenKind.ACTION)
        after = is_action.flip(-1).long().cumsum(-1).flip(-1)  # action tokens from here to the end of the step
        earned = torch.where(is_action & (after == 1), reward[..., None].cpu(), 0.0)
        return stack_rows(
            tokens.ids.flatten(1), tokens.kept.flatten(1), kind.flatten(1), earned.flatten(1),
            begin=self.begin, pad=self.tokenizer.control.pad, row_length=row_length, loss_on=self.loss_on,
        )  # fmt: skip


def begin_token(tokenizer: Tokenizer) -> int:
    """The control token before a row that the environment begins; raises ValueError if the tokenizer has none."""
    if not tokenizer.control.marks_turns:
        raise ValueError(
            f"{type(tokenizer).__name__} has no control tokens for turns: use a CharTokenizer or HFTokenizer."
        )
    return tokenizer.control.begin_state


def stack_rows(
    ids: Tensor, kept: Tensor, kind: Tensor, earned: Tensor, *, begin: int, pad: int, row_length: int, loss_on: LossOn
) -> TensorDict:
    """Rows ``[N]`` of tokens without those that are left out, moved to the left.

    Args:
        ids: int64 ``[N, M]``.
        kept: bool ``[N, M]``.
        kind: int64 ``[N, M]``.
        earned: float32 ``[N, M]``, the ``token_reward``.
        begin: the first token of all rows.
        pad: the token of padding.
        row_length: ``T``.
        loss_on: see :class:`StepRows`.

    Raises:
        ValueError: a row has more than ``row_length`` tokens.
    """
    length = 1 + kept.sum(-1)
    if len(ids) and int(length.max()) > row_length:
        raise ValueError(f"A row has {int(length.max())} tokens, more than row_length={row_length}.")
    place = torch.where(kept, kept.cumsum(-1), row_length)  # other tokens go to a column that is cut off
    shape = (len(ids), row_length + 1)

    def moved(values: Tensor, fill: int) -> Tensor:
        return torch.full(shape, fill, dtype=values.dtype).scatter_(-1, place, values)[:, :row_length]

    tokens = moved(ids, pad)
    tokens[:, 0] = begin
    attention = torch.arange(row_length) < length[:, None]
    kinds = moved(kind, int(TokenKind.FORMAT))
    agent = kinds == TokenKind.ACTION
    if loss_on == "all":
        agent = attention.clone()
        agent[:, 0] = False
    entries = {TOKENS: tokens, ATTENTION_MASK: attention, TOKEN_KIND: kinds, TOKEN_REWARD: moved(earned, 0)}
    return TensorDict({**entries, AGENT_MASK: agent}, batch_size=[len(ids)])
