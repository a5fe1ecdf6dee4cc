"""Behaviour cloning of rows: the language-model loss on the tokens that the agent wrote."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_lang._checks import torchrl_names
from torchrl_lang.modules.controllers import KLController
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.objectives.base import ActorNormalizer, LogitsChunk, Policy, RowLoss, over_rows
from torchrl_lang.objectives.policy import actor_loss, kl_controller, reference_of, score_decisions


class BCLoss(RowLoss):
    """Behaviour cloning (BC) of rows of tokens.

    ``loss_actor = sum_t w_t * CE(pi(. | x_<=t), x_t+1) / n`` with ``w_t = 1`` on the agent's tokens and
    ``transition_weight`` on the environment's. One pass of the trunk; the language-model head is evaluated at
    decisions, and at every real token only with a ``transition_weight``. On a dataset's best episodes
    (:func:`torchrl_lang.data.best_rows`) this is %BC, on the best of a policy's own games rejection sampling.

    A ``kl_weight`` penalizes divergence from a reference, ``loss_kl = kl_weight * mean_j KL(pi(. | s_j) || ref(. |
    s_j))`` over the decisions, exact over the vocabulary, of the distribution that an utterance actor acts by.

    Args:
        actor_network: a language-model actor: a trunk (``tokens``, ``attention_mask`` -> ``hidden`` ``[B, T, H]``) and
            a head (``hidden`` -> ``logits``), or a trunk that writes ``logits`` ``[B, T, V]``; or an
            :class:`~torchrl_lang.modules.UtteranceActor` over one, whose language model is trained.
        transition_weight: weight of the environment's tokens.
        actor_normalizer: ``"all"`` divides by the real tokens, ``"action"`` by the agent's.
        logits_chunk: positions whose logits exist at a time, where the head is one linear layer. Gradients are then
            computed chunk by chunk beside the loss, and equal those of the plain form. ``"auto"``: a few dozen
            megabytes at a time from 512 tokens on. A number forces pieces, None the whole table.
        kl_weight: weight of the divergence, a number or a :class:`~torchrl_lang.transforms.KLController`.
        reference: with a ``kl_weight``: :func:`~torchrl_lang.transforms.frozen_copy` or
            :func:`~torchrl_lang.transforms.adapters_off` of the actor.
        embed_weights: keep the weights of the reference in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another reference raises.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``agent_mask`` (bool), each ``[*B, T]``, and
    is left as it was. The output holds ``loss_actor`` and, with a ``kl_weight``, ``loss_kl`` and the metric ``kl``, the
    mean divergence of a decision in nats, detached.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import BCLoss
        >>> loss = BCLoss(language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8)))
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     batch_size=[1],
        ... )
        >>> bool(loss(rows)["loss_actor"] > 0)
        True
    """

    kl_controller: KLController | None
    _takes_guidance = True
    out_keys = ["loss_actor"]
    _row_entries: tuple[str, ...] = ("tokens", "attention_mask", "agent_mask")

    @torchrl_names()
    def __init__(
        self,
        actor_network: Policy,
        *,
        transition_weight: float = 0.0,
        actor_normalizer: ActorNormalizer = "all",
        logits_chunk: LogitsChunk = "auto",
        kl_weight: float | KLController = 0.0,
        reference: FrozenActor | None = None,
        embed_weights: bool = False,
        reduction: str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            transition_weight=transition_weight,
            actor_normalizer=actor_normalizer,
            logits_chunk=logits_chunk,
            reduction=reduction,
        )
        self.kl_controller = kl_controller(kl_weight)
        self.reference = reference_of(actor_network, reference, is_read=self.kl_controller is not None)
        self.embed_weights = embed_weights
        if self.reference is not None:
            self.out_keys = ["loss_actor", "loss_kl", "kl"]

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of a batch of rows."""
        batch = self._find(tensordict)
        rows = self._policy_trunk(batch.rows.copy())
        losses, metrics = {"loss_actor": actor_loss(self, batch, rows)}, {}
        if self.kl_controller is not None:
            kl = score_decisions(self, batch, rows).kl
            losses["loss_kl"] = self.kl_controller(kl.dtype) * self._reduce_decisions(kl, batch)
            metrics["kl"] = kl
        return self._output(batch, losses, metrics)
