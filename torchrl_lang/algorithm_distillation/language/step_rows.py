"""Rows of windows of learning histories, for losses and models of this library, and their tokenizer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang._checks import checked
from torchrl_lang.algorithm_distillation.language.template import Slot, StepTemplate, TokenKind, slot_words
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, REWARD, TOKEN_REWARD, TOKENS, entry
from torchrl_lang.text import CharTokenizer, Tokenizer

TOKEN_KIND = "token_kind"
"""int64 ``[*B, T]``: what each token of a row describes, a :class:`TokenKind`."""

LossOn = Literal["actions", "all"]
"""Which tokens ``agent_mask`` names, and losses train on: actions (completions), or all but the first of a row."""

Part = Literal["state", "action", "outcome"]
"""Part of a step: all before its action, the action, or all after it."""


class Tokens(NamedTuple):
    """Tokens of steps."""

    ids: Tensor
    """int64 ``[*B, W]``, -1 where a step has no such token."""
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


class StepTokens:
    """Encodes steps with a tokenizer: a table of the words of each slot of the template maps numbers to tokens.

    A word may have several tokens, as in a pretrained tokenizer. The tokens are those of the steps' text: each word is
    encoded with the space before it.
    """

    def __init__(self, template: StepTemplate, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._tables: dict[tuple[str, ...], Tensor] = {}
        self.slots: dict[Part, list[Slot]] = {"state": [], "action": [], "outcome": []}
        part: Part = "state"
        for slot in template.slots:
            if slot.kind == TokenKind.ACTION:
                part = "action"
            elif part == "action":
                part = "outcome"
            self.slots[part].append(slot)

    @property
    def longest_step(self) -> int:
        """The largest number of tokens of a step; ValueError if the template has decimals."""
        if not self.template.is_finite:
            raise ValueError("The template has decimals, expected quantizers with finitely many words.")
        tables = (self._table(slot.words()) for slot in self.template.slots)
        return sum(int((table >= 0).sum(-1).max()) for table in tables)

    def action_words(self) -> list[Tensor]:
        """The tokens of the words of each number of an action, int64 ``[words]``.

        Raises:
            ValueError: a word has several tokens.
        """
        tables = [self._table(slot.words())[:-1] for slot in self.slots["action"]]
        if any(((table >= 0).sum(-1) != 1).any() for table in tables):
            raise ValueError("A word of the action is several tokens: use template_tokenizer(template).")
        return [table[:, 0] for table in tables]

    def encode(self, steps: TensorDictBase, *parts: Part) -> Tokens:
        """The tokens of parts of steps ``[*B]``, by default of whole steps; only the entries of the parts are read.

        Raises:
            KeyError, ValueError: an entry is missing or has another shape, or a number has no word.
        """
        ids, kind = [], []
        for slot in (slot for part in parts or self.slots for slot in self.slots[part]):
            words, number = slot_words(steps, self.template, slot)
            ids.append(self._table(words)[number.cpu()])
            kind += [int(slot.kind)] * ids[-1].shape[-1]
        return Tokens(torch.cat(ids, -1), torch.tensor(kind))

    def nothing(self, part: Part, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Room for a part of steps ``[N, C]`` with no tokens."""
        width = sum(self._table(slot.words()).shape[-1] for slot in self.slots[part])
        return torch.full((*shape, width), -1, device=device)

    def _table(self, words: tuple[str, ...]) -> Tensor:
        """The tokens of each word, int64 ``[words, P]``, -1 where it has no more."""
        if (known := self._tables.get(words)) is not None:
            return known
        encoded = [torch.tensor(self.tokenizer.encode(f" {word}") if word else [], dtype=torch.int64) for word in words]
        table = pad_sequence(encoded, batch_first=True, padding_value=-1)
        if self.template.is_finite:
            self._tables[words] = table
        return table


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
        ValueError: ``loss_on`` is unknown.

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

    @checked
    def __init__(self, template: StepTemplate, tokenizer: Tokenizer, *, loss_on: LossOn = "actions") -> None:
        self.template, self.tokenizer, self.loss_on = template, tokenizer, loss_on
        self.tokens = StepTokens(template, tokenizer)

    def __call__(self, windows: TensorDictBase) -> TensorDict:
        """The rows ``[N]`` of windows ``[N, L]``, of ``L`` of the longest steps; with decimals of the longest row.

        Args:
            windows: successive steps, in the entries of a
                :class:`~torchrl_lang.algorithm_distillation.LearningHistory`.

        Raises:
            KeyError: an entry is missing.
            ValueError: a number has no word, or the tokenizer has no token that begins a row.
        """
        ids, kind = self.tokens.encode(windows)
        row_length = 1 + windows.shape[1] * self.tokens.longest_step if self.template.is_finite else None
        is_action = (ids >= 0) & (kind == TokenKind.ACTION)
        after = is_action.flip(-1).long().cumsum(-1).flip(-1)  # action tokens from here to the end of the step
        earned = torch.where(is_action & (after == 1), entry(windows, REWARD).cpu(), 0.0)
        columns = (column.flatten(1) for column in (ids, kind.expand_as(ids), earned))
        return stack_rows(*columns, tokenizer=self.tokenizer, row_length=row_length, loss_on=self.loss_on)


def begin_token(tokenizer: Tokenizer) -> int:
    """The control token before a row that the environment begins; raises ValueError if the tokenizer has none."""
    if not tokenizer.control.marks_turns:
        name = type(tokenizer).__name__
        raise ValueError(f"{name} has no control tokens for turns: use a CharTokenizer or HFTokenizer.")
    return tokenizer.control.begin_state


def stack_rows(
    ids: Tensor, kind: Tensor, earned: Tensor, *, tokenizer: Tokenizer, row_length: int | None, loss_on: LossOn
) -> TensorDict:
    """Rows ``[N]`` of tokens without those that are left out, moved to the left.

    Args:
        ids: int64 ``[N, M]``, -1 for a token that is left out.
        kind: int64 ``[N, M]``.
        earned: float32 ``[N, M]``, the ``token_reward``.
        tokenizer: of the first token of all rows, and of padding.
        row_length: ``T``, at least that of the longest row; None for that.
        loss_on: see :class:`StepRows`.
    """
    length = 1 + (ids >= 0).sum(-1)
    if row_length is None:
        row_length = int(length.max()) if len(ids) else 1
    tokens = moved_left(ids, ids, row_length, tokenizer.control.pad)
    tokens[:, 0] = begin_token(tokenizer)
    attention = torch.arange(row_length) < length[:, None]
    kinds = moved_left(kind, ids, row_length, int(TokenKind.FORMAT))
    agent = kinds == TokenKind.ACTION
    if loss_on == "all":
        agent = attention.clone()
        agent[:, 0] = False
    entries = {TOKENS: tokens, ATTENTION_MASK: attention, TOKEN_KIND: kinds, AGENT_MASK: agent}
    return TensorDict({**entries, TOKEN_REWARD: moved_left(earned, ids, row_length, 0)}, batch_size=[len(ids)])


def moved_left(values: Tensor, ids: Tensor, row_length: int, fill: int) -> Tensor:
    """Rows ``[N, row_length]`` of the values ``[N, M]`` of tokens that are not left out, from the second place on."""
    kept = ids >= 0
    place = torch.where(kept, kept.cumsum(-1), row_length)  # other tokens go to a column that is cut off
    rows = torch.full((len(ids), row_length + 1), fill, dtype=values.dtype, device=ids.device)
    return rows.scatter_(-1, place, values)[:, :row_length]
