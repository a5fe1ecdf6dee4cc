"""The policy that made the data, or what stands for it, as the targets of a loss read it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.objectives.checks import vocabulary

__all__ = ["Behavior", "check_frozen", "frozen_behavior"]


@dataclass
class Behavior:
    """The policy that made the data, or what stands for it: a language model's own distribution, at temperature 1."""

    scorer: RowScorer
    states: States
    """What its trunk wrote, each ``[B, T, ...]``."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """In which its head runs, without gradients in any case."""

    @torch.no_grad()
    def log_softmax(self, place: Tensor) -> Tensor:
        """Log-probability of every token at ``M`` places, ``[M, V]``."""
        with self.context():
            return self.scorer.log_softmax(self.states, place)

    @torch.no_grad()
    def log_prob(self, batch: DecisionBatch) -> Tensor:
        """Log-probability of the tokens that were written, ``[N]``."""
        if batch.empty:
            return torch.zeros(0, device=batch.tokens.device)
        with self.context():
            return self.scorer.log_prob(batch, self.states)


def frozen_behavior(reference: FrozenActor, batch: DecisionBatch) -> Behavior:
    """A frozen actor's own distribution: one pass of its trunk over the rows, without gradients."""
    reference.check_unchanged()
    scorer = RowScorer(RowScorer(reference.actor).language_actor)
    with reference.eval_mode(), torch.no_grad():
        return Behavior(scorer, scorer.states(batch), reference.eval_mode)


def check_frozen(loss: str, name: str, frozen: Any, actor: object) -> None:
    """Raise unless the option ``name`` of a loss is a frozen actor that writes the same tokens as ``actor``."""
    if not isinstance(frozen, FrozenActor):
        raise TypeError(
            f"{loss} needs {name} as a FrozenActor, got {type(frozen).__name__}: make one with frozen_copy(actor)."
        )
    theirs, ours = vocabulary(frozen.actor), vocabulary(actor)
    if theirs is not None and ours is not None and theirs < ours:
        raise ValueError(
            f"The {name} has probabilities for {theirs} tokens and the policy can write {ours}: train both on data of "
            "one tokenizer."
        )
