"""Behaviour cloning of rows: the language-model loss on the tokens that the agent wrote."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch

from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives.actor import ActorNormalizer, actor_loss
from torchrl_lang.objectives.rows import LogitsChunk, RowLoss

__all__ = ["BCLoss"]


class BCLoss(RowLoss):
    """Behaviour cloning (BC) of rows of tokens.

    ``loss_actor = sum_t w_t * CE(pi(. | x_<=t), x_t+1) / n`` with ``w_t = 1`` on the agent's tokens and
    ``transition_weight`` on the environment's. One pass of the trunk; the language-model head is evaluated at
    decisions, and at every real token only with a ``transition_weight``. On a data set's best episodes
    (:func:`torchrl_lang.data.best_rows`) this is %BC.

    Args:
        actor_network: a language-model actor: a trunk (``tokens``, ``attention_mask`` -> ``hidden`` ``[B, T, H]``) and
            a head (``hidden`` -> ``logits``), or a trunk that writes ``logits`` ``[B, T, V]``.
        transition_weight: weight of the environment's tokens.
        actor_normalizer: ``"all"`` divides by the real tokens, ``"action"`` by the agent's.
        logits_chunk: positions whose logits exist at a time, where the head is one linear layer. Gradients are then
            computed piece by piece beside the loss, and equal those of the plain form. ``"auto"``: a few dozen
            megabytes at a time from 512 tokens on. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``action_mask`` (bool), each ``[*B, T]``, and
    is left as it was. The output holds ``loss_actor``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import BCLoss
        >>> loss = BCLoss(language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8)))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     action_mask=torch.tensor([[False, True, True, False]]),
        ...     batch_size=[1],
        ... )
        >>> bool(loss(rows)["loss_actor"] > 0)
        True
    """

    @dataclass
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """The keys of :class:`RowLoss`."""

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    actor_network: ProbabilisticTensorDictSequential
    out_keys = ["loss_actor"]
    _row_entries = ("tokens", "attention_mask", "action_mask")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        transition_weight: float = 0.0,
        actor_normalizer: ActorNormalizer = "all",
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction, logits_chunk)
        if actor_normalizer not in ("all", "action"):
            raise ValueError(f"actor_normalizer must be 'all' or 'action', got {actor_normalizer!r}.")
        self.actor_network = actor_network
        self.transition_weight = transition_weight
        self.actor_normalizer = actor_normalizer

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of a batch of rows."""
        trunk, head, _ = split_actor(self.actor_network)
        batch = self._find(tensordict)
        loss = actor_loss(
            batch,
            trunk(batch.rows),
            head,
            None,
            transition_weight=self.transition_weight,
            normalizer=self.actor_normalizer,
            reduction=self.reduction,
            logits_chunk=self.logits_chunk,
        )
        return TensorDict({"loss_actor": loss})
