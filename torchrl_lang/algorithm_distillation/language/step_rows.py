"""Rows of windows of learning histories, for losses and models of this library."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.algorithm_distillation.language.step_template import StepTemplate, TokenKind
from torchrl_lang.algorithm_distillation.language.step_text import steps_to_words
from torchrl_lang.algorithm_distillation.language.step_tokens import StepTokens, Tokens, encode_word
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, REWARD, TOKEN_REWARD, TOKENS, entry
from torchrl_lang.text import Tokenizer

__all__ = ["TOKEN_KIND", "LossOn", "StepRows", "begin_token", "mask_losses", "stack_rows"]

TOKEN_KIND = "token_kind"
"""int64 ``[*B, T]``: what each token of a row describes, a :class:`TokenKind`."""

LossOn = Literal["actions", "all"]
"""Which tokens ``agent_mask`` names, and losses train on: actions (completions), or all but the first of a row."""


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
        >>> from torchrl_lang.algorithm_distillation.language import Levels, StepRows, StepTemplate, template_tokenizer
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 10)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> cells, moves = Levels(range(3)), Levels(range(5), ["stay", "north", "south", "west", "east"])
        >>> template = StepTemplate.compact([cells, cells], moves, Levels([0, 1]))
        >>> tokenizer = template_tokenizer(template)
        >>> rows = StepRows(template, tokenizer)(history.steps[0])
        >>> rows["tokens"].shape
        torch.Size([4, 41])
        >>> tokenizer.decode(rows["tokens"][0, :9])
        '<s> 1 1 ... 0'
    """

    def __init__(self, template: StepTemplate, tokenizer: Tokenizer, *, loss_on: LossOn = "actions") -> None:
        one_of("loss_on", loss_on, ("actions", "all"))
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
            [(id, kind) for word, kind in step for id in encode_word(word, self.tokenizer)]
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
            f"Rows of histories begin with a control token, which {type(tokenizer).__name__} lacks: use one with "
            f"control tokens for turns, such as CharTokenizer or HFTokenizer."
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
        raise ValueError(
            f"A row has {int(length.max())} tokens, more than row_length={row_length}: give shorter windows or longer "
            f"rows."
        )
    place = torch.where(kept, kept.cumsum(-1), row_length)  # other tokens go to a column that is cut off
    shape = (len(ids), row_length + 1)

    def moved(values: Tensor, fill: int) -> Tensor:
        return torch.full(shape, fill, dtype=values.dtype).scatter_(-1, place, values)[:, :row_length]

    tokens = moved(ids, pad)
    tokens[:, 0] = begin
    attention = torch.arange(row_length) < length[:, None]
    kinds = moved(kind, int(TokenKind.FORMAT))
    entries = {TOKENS: tokens, ATTENTION_MASK: attention, TOKEN_KIND: kinds, TOKEN_REWARD: moved(earned, 0)}
    return mask_losses(TensorDict(entries, batch_size=[len(ids)]), loss_on)


def mask_losses(rows: TensorDict, loss_on: LossOn) -> TensorDict:
    """Add the ``agent_mask`` of rows, in place; see :class:`StepRows`."""
    mask = rows[TOKEN_KIND] == TokenKind.ACTION
    if loss_on == "all":
        mask = rows[ATTENTION_MASK].clone()
        mask[:, 0] = False
    return rows.set(AGENT_MASK, mask)
