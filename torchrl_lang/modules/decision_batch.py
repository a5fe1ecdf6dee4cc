"""The decisions of a batch of rows and the tokens chosen there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.functional import decision_mask, shift_left
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, FEATURES, FEATURES_MASK, TOKENS, entry

__all__ = ["DecisionBatch", "refuse_steps"]


def refuse_steps(tensordict: TensorDictBase, tokens_key: NestedKey = TOKENS) -> None:
    """Raise ValueError if ``tensordict`` holds steps of a rollout instead of rows."""
    if ("next", tokens_key) in tensordict.keys(True):
        raise ValueError(
            "Rows are whole episodes, but these are steps of a rollout (there is a 'next' entry), whose transcripts "
            "repeat each other: convert them with torchrl_lang.data.rows_from_rollout, or score single turns with an "
            "UtteranceActor as reference."
        )


@dataclass
class DecisionBatch:
    """Rows ``[B, W]`` and their ``N`` decisions, the states whose next token the agent wrote, in reading order."""

    tokens: Tensor
    """int64 ``[B, W]``."""
    attention_mask: Tensor
    """bool ``[B, W]``."""
    place: Tensor
    """int64 ``[N]``: decisions in a batch flattened to ``[B * W]``."""
    action: Tensor
    """int64 ``[N]``: the token written there."""
    agent_mask: Tensor
    """bool ``[B, W]``."""
    shape: torch.Size
    """``[*B, T]``, the shape of the input."""
    rows: TensorDictBase
    """Entries of the rows ``[*B]``: ``tokens`` and, if there are, features."""

    @staticmethod
    def read(tensordict: TensorDictBase) -> DecisionBatch:
        """The decisions of the rows in ``tensordict``; a ValueError if it holds steps of a rollout."""
        refuse_steps(tensordict)
        tokens, attention, agent_mask = (entry(tensordict, key) for key in (TOKENS, ATTENTION_MASK, AGENT_MASK))
        shape = tokens.shape
        tokens, attention, agent_mask = (x.reshape(-1, shape[-1]) for x in (tokens, attention, agent_mask))
        width = max(int(attention.sum(-1).max()), 1) if tokens.shape[0] else 1
        tokens, attention, agent_mask = (x[:, :width] for x in (tokens.long(), attention, agent_mask))
        place = decision_mask(agent_mask).flatten().nonzero().squeeze(-1)
        action = shift_left(tokens).flatten()[place]
        rows = tensordict.select(TOKENS, FEATURES, FEATURES_MASK, strict=False)
        return DecisionBatch(tokens, attention, place, action, agent_mask, shape, rows)

    @property
    def features(self) -> RowFeatures | None:
        """The features of the rows, if they have some: ask where a trunk reads them, others may call a column so."""
        return RowFeatures.read(self.rows, self.rows.get(TOKENS).shape[:-1])

    @property
    def empty(self) -> bool:
        """Whether there are no decisions: models may fail on empty batches."""
        return self.place.shape[0] == 0

    def zeros(self) -> Tensor:
        """Zero for every token, float32 ``[*B, T]``."""
        return torch.zeros(self.shape, device=self.tokens.device)

    def slot(self, end_of_action: int, place: Tensor | None = None) -> Tensor:
        """Index of each action in its utterance, int64 ``[N]``, from 0; ``end_of_action`` ends an utterance.

        At other places of ``[B * W]``, the index that an action written after them has, int64 ``[M]``.
        """
        unfinished = self.agent_mask & (self.tokens != end_of_action)
        position = torch.arange(self.tokens.shape[-1], device=self.tokens.device).expand(self.tokens.shape)
        before = torch.where(unfinished, -1, position).cummax(-1).values  # the last token before the utterance
        return (position - before).flatten()[self.place if place is None else place]

    def at_decisions(self, values: Tensor, place: Tensor | None = None, *, fill: float = 0.0) -> Tensor:
        """Values of decisions, or of other places in ``[B * W]``, ``[N]``, as ``[B, W]`` with ``fill`` elsewhere."""
        dense = values.new_full((self.tokens.numel(),), fill)
        return dense.index_copy(0, self.place if place is None else place, values).reshape(self.tokens.shape)

    def at_tokens(self, values: Tensor) -> Tensor:
        """Scatter values of decisions, ``[N]``, to the agent's tokens, ``[*B, T]``; zero elsewhere."""
        dense = self.at_decisions(values, self.place + 1)
        padding = self.shape[-1] - dense.shape[-1]
        return nn.functional.pad(dense, (0, padding)).reshape(self.shape)
