"""Proximal policy optimisation (PPO, arXiv 1707.06347) for rows of tokens, one pass of the trunk a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from torch import Tensor, nn

from torchrl_lang._checks import finite, one_of, positive, within
from torchrl_lang.functional import masked_mean, shift_left, standardized
from torchrl_lang.functional.advantages import Bootstrap
from torchrl_lang.functional.kl import KLEstimator
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.controllers import KLController
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.head_values import STATE_VALUE
from torchrl_lang.objectives.actor_critic_base import AdvantageRowLoss
from torchrl_lang.objectives.base import LogitsChunk, TransitionBatch, kl_controller
from torchrl_lang.objectives.checks import check_actor, check_token
from torchrl_lang.objectives.no_rows import for_any_number
from torchrl_lang.objectives.ppo_terms import (
    clipped_objective,
    corrected_kl,
    effective_sample_size,
    explained_variance,
    value_loss,
)
from torchrl_lang.objectives.token_scores import TokenScores, checked_reference, score_decisions, unwritable
from torchrl_lang.schema import TOKEN_LOG_PROB

__all__ = ["PPOLoss"]

_METRICS = ("kl_approx", "clip_fraction", "ESS", "entropy", "explained_variance", "kl")

_ESTIMATED = "call loss.estimate(rows) once a batch, before the first epoch"
_SOURCES = {
    "token_log_prob": "take it along from acting, rows_from_rollout(..., carry=['token_log_prob'])",
    "advantage": _ESTIMATED,
    "value_target": _ESTIMATED,
    "state_value": _ESTIMATED,
    "ref_log_prob": "have ReferenceModelLogProbTransform write it into the rows, or use kl_estimator='exact'",
}


class PPOLoss(AdvantageRowLoss):
    r"""Proximal policy optimisation over rows of tokens, each token an action.

    At each decision ``j`` with state ``s_j`` and token ``a_j``, with ``b_j`` the log-probability that acting wrote down
    and ``rho_j = exp(log pi(a_j | s_j) - b_j)``::

        loss_objective = -mean_j min(rho_j A_j, clip(rho_j, 1 - eps, 1 + eps) A_j)     (arXiv 1707.06347, eq. 7)
        loss_critic    = value_weight   * mean_j (V(s_j) - G_j)^2
        loss_entropy   = -entropy_weight * mean_j H(pi(. | s_j))
        loss_kl        = kl_weight      * mean_j KL_j

    Every output whose name begins with ``loss_`` is already weighted: a training step minimises their sum. A term of
    weight zero is not computed and comes out as zero.

    ``A`` and ``G`` are estimated once a batch by :meth:`estimate`, with two clocks, one inside an utterance and one
    across turns (:func:`~torchrl_lang.functional.two_clock_advantages`), and reused by every epoch. ``b`` is never
    recomputed. The loss scores the very distribution that acting drew from: given an
    :class:`~torchrl_lang.modules.UtteranceActor`, with its temperature, filters, forbidden tokens and certain last
    slot. So on fresh data ``rho`` is 1, up to rounding, if the model acts as it learns: decoding runs in evaluation
    mode, so a model with dropout should learn in evaluation mode, too.

    The divergence from a reference is ``KL(pi(. | s_j) || ref(. | s_j))`` of one decision, in expectation over the
    sampled tokens, with its exact gradient. ``"k1"``, ``"k2"``, ``"k3"`` estimate it from the sampled token, as
    ``rho * k``, the importance weight unclipped and gradients through both factors
    (:func:`~torchrl_lang.objectives.ppo_terms.corrected_kl`); the rows bring ``ref_log_prob``. ``"exact"`` sums over
    the vocabulary; its ``reference`` reads the rows in every call. That a token changes what follows is left to the
    advantages: for that, keep the reward near the reference as well
    (:class:`~torchrl_lang.transforms.KLConstrainedTransform`).

    Args:
        actor_network: an :class:`~torchrl_lang.modules.UtteranceActor`, or a language actor that sampled its tokens at
            temperature 1 over the whole vocabulary.
        value_network: any module ``hidden [N, H] -> state_value [N, 1]`` or ``[N]``.

    Keyword Args:
        value_trunk: a trunk of its own for the values; by default they read the actor's. It may read what the actor
            must not, see :class:`~torchrl_lang.modules.PrivilegedTrunk`.
        clip_epsilon: ``eps``, or ``(low, high)``.
        value_clip: how far a value may move from what :meth:`estimate` found before it gains nothing by moving on; None
            for no limit.
        value_weight, entropy_weight: weights of the terms.
        kl_weight: weight of the divergence, a number or a :class:`~torchrl_lang.transforms.KLController`, which the
            training loop updates by the metric ``kl``.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"exact"``.
        reference: for ``"exact"``: :func:`~torchrl_lang.transforms.frozen_copy` or
            :func:`~torchrl_lang.transforms.adapters_off` of the actor. It is not among the parameters.
        embed_weights: keep the weights of the reference in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another reference raises.
        gamma, lmbda: discount and trust inside an utterance.
        turn_gamma, turn_lmbda: across turns.
        bootstrap: the value that a turn contributes to the turn before it: ``"first"``, the value of its first
            decision, or ``"mean"``, the mean over its decisions.
        end_of_action: id of the token that ends an utterance, default that of an ``UtteranceActor``. It separates
            turns where the environment does not reply (:func:`~torchrl_lang.functional.turn_end_mask`).
        normalize_advantage: standardise the advantages over the decisions of each batch that count, by the unbiased
            deviation (:func:`~torchrl_lang.functional.standardized`).
        loss_critic_type: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        detach_value: no gradient from the values into the trunk.
        logits_chunk: decisions whose logits exist at a time; the backward pass computes them again. ``"auto"``: pieces
            of a few dozen megabytes where all would be more. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``agent_mask`` (bool), ``token_log_prob``,
    ``advantage``, ``value_target`` (float), with ``value_clip`` ``state_value`` and with a sampled divergence
    ``ref_log_prob``, each ``[*B, T]``, numbers at the tokens that the agent wrote. It is left as it was. The output
    holds the four losses and, detached, over the decisions that count: ``kl_approx`` (mean ``-log rho``),
    ``clip_fraction``, ``ESS`` (effective sample size, as a share), ``entropy`` (mean, in nats), ``explained_variance``
    of the values (NaN without a critic) and ``kl``, the divergence of a row in nats (NaN without one).

    Raises:
        KeyError: an entry is missing; the message names its source.
        ValueError: an option is out of range, shapes differ, steps of a rollout came instead of rows, a number is not
            finite, or an action that counts cannot be written by the policy.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
        >>> from torchrl_lang.objectives import PPOLoss
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> control, vocabulary = env.tokenizer.control, env.tokenizer.vocab_size
        >>> lm = causal_lm(vocab_size=vocabulary, layers=1, width=16, heads=2, max_length=48)
        >>> policy = UtteranceActor(language_actor(lm), control, env.action_length, seed=0)
        >>> loss = PPOLoss(policy, value_module(ValueHead(16)))
        >>> walks = env.rollout(8, policy, break_when_any_done=False)
        >>> rows = loss.estimate(rows_from_rollout(walks, unfinished="truncate", carry=["token_log_prob"]))
        >>> for epoch in range(2):
        ...     out = loss(rows)
        ...     sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> bool(out["kl_approx"].abs() < 1e-5)
        True
    """

    @dataclass
    class _AcceptedKeys(AdvantageRowLoss._AcceptedKeys):
        """The keys of :class:`AdvantageRowLoss` and those of acting."""

        token_log_prob: NestedKey = TOKEN_LOG_PROB
        ref_log_prob: NestedKey = "ref_log_prob"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    kl_controller: KLController | None
    _sources = _SOURCES
    out_keys = ["loss_objective", "loss_critic", "loss_entropy", "loss_kl", *_METRICS]

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        value_network: nn.Module,
        *,
        value_trunk: TensorDictModuleBase | None = None,
        clip_epsilon: float | tuple[float, float] = 0.2,
        value_clip: float | None = None,
        value_weight: float = 0.5,
        entropy_weight: float = 0.0,
        kl_weight: float | KLController = 0.0,
        kl_estimator: KLEstimator | Literal["exact"] = "k1",
        reference: FrozenActor | None = None,
        embed_weights: bool = False,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        turn_gamma: float = 0.99,
        turn_lmbda: float = 0.95,
        bootstrap: Bootstrap = "first",
        end_of_action: int | None = None,
        normalize_advantage: bool = True,
        loss_critic_type: Literal["l2", "l1", "smooth_l1"] = "l2",
        detach_value: bool = False,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(reduction, logits_chunk)
        check_actor("PPOLoss", actor_network)
        check_token("end_of_action", end_of_action, actor_network)
        self.actor_network = actor_network
        self.value_network = self._checked_head("value_network", value_network, STATE_VALUE, value_trunk)
        self.value_trunk = value_trunk
        clocks = {"gamma": gamma, "lmbda": lmbda, "turn_gamma": turn_gamma, "turn_lmbda": turn_lmbda}
        for name, number in clocks.items():
            within(name, number, 0, 1)
        one_of("bootstrap", bootstrap, ("first", "mean"))
        one_of("loss_critic_type", loss_critic_type, ("l2", "l1", "smooth_l1"))
        one_of("kl_estimator", kl_estimator, ("k1", "k2", "k3", "exact"))
        finite("value_weight", value_weight)
        finite("entropy_weight", entropy_weight, low=None)
        if value_clip is not None:
            positive("value_clip", value_clip)
        self.gamma, self.lmbda, self.turn_gamma, self.turn_lmbda = gamma, lmbda, turn_gamma, turn_lmbda
        self.bootstrap, self.end_of_action, self.detach_value = bootstrap, end_of_action, detach_value
        self.clip_epsilon, self.value_clip = _bounds(clip_epsilon), value_clip
        self.value_weight, self.entropy_weight = value_weight, entropy_weight
        self.kl_controller = kl_controller(kl_weight)
        self.kl_estimator = kl_estimator
        exact = self.kl_controller is not None and kl_estimator == "exact"
        self.reference = checked_reference(actor_network, reference, is_read=exact)
        self.embed_weights = embed_weights
        self.normalize_advantage, self.loss_critic_type = normalize_advantage, loss_critic_type
        self._row_entries = self._entries_read()

    def _entries_read(self) -> tuple[str, ...]:
        """The entries that ``forward`` reads with these options."""
        wanted = {
            "value_target": bool(self.value_weight),
            "state_value": bool(self.value_weight) and self.value_clip is not None,
            "ref_log_prob": self.kl_controller is not None and self.kl_estimator != "exact",
        }
        always = ("tokens", "attention_mask", "agent_mask", "token_log_prob", "advantage")
        return (*always, *(name for name, is_read in wanted.items() if is_read))

    @dispatch(source="_all_in_keys")
    @for_any_number
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows, which holds what :meth:`estimate` wrote."""
        batch = self._find(tensordict)
        counted = batch.counts
        given = {name: self._given(tensordict, name, batch) for name in self._row_entries if name in _SOURCES}
        self._refuse(batch, [*_not_finite(given), *unwritable(self.scorer, batch)])
        states = split_actor(self.language_actor).trunk(batch.rows.copy())
        scores = score_decisions(
            self.scorer,
            batch,
            states,
            entropy_gradient=bool(self.entropy_weight),
            reference=self.reference,
            logits_chunk=self.logits_chunk,
        )
        # What does not count must not reach exp(): infinity there has no gradient that a mask could stop.
        log_ratio = torch.where(counted, scores.log_prob - given["token_log_prob"], 0.0)
        advantage = standardized(given["advantage"], counted) if self.normalize_advantage else given["advantage"]
        zero = log_ratio.new_zeros(batch.shape if self.reduction == "none" else ())
        metrics = self._metrics(scores, log_ratio, counted)
        out = {"loss_critic": zero, "loss_entropy": zero, "loss_kl": zero}
        objective = clipped_objective(log_ratio, advantage, self.clip_epsilon)
        out["loss_objective"] = self._reduce_decisions(objective, batch)
        if self.value_weight:
            value = self._values(states if self.value_trunk is None else self._value_states(batch.rows), batch.place)
            goal, acted = given["value_target"], given.get("state_value")
            error = value_loss(value, goal, self.loss_critic_type, acted, self.value_clip)
            out["loss_critic"] = self.value_weight * self._reduce_decisions(error, batch)
            metrics["explained_variance"] = explained_variance(value.detach(), goal, counted)
        if self.entropy_weight:
            out["loss_entropy"] = -self.entropy_weight * self._reduce_decisions(scores.entropy, batch)
        if self.kl_controller is not None:
            kl = scores.kl
            if self.kl_estimator != "exact":
                kl = corrected_kl(log_ratio, scores.log_prob, given["ref_log_prob"], self.kl_estimator)
            assert kl is not None
            out["loss_kl"] = self.kl_controller(kl.dtype) * self._reduce_decisions(kl, batch)
            rows = batch.at_decisions(counted.float()).any(-1).sum().clamp_min(1)
            metrics["kl"] = torch.where(counted, kl.detach(), 0.0).sum() / rows
        return TensorDict({**out, **metrics})

    def _given(self, tensordict: TensorDictBase, name: str, batch: TransitionBatch) -> Tensor:
        """An entry of the agent's tokens at the decisions, ``[N]``."""
        entry = tensordict.get(getattr(self.tensor_keys, name))
        return shift_left(entry.detach().reshape(batch.decision.shape)).flatten()[batch.place]

    @torch.no_grad()
    def _metrics(self, scores: TokenScores, log_ratio: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """How far the policy has moved, over the decisions that count."""
        low, high = self.clip_epsilon
        ratio = log_ratio.exp()
        nan = log_ratio.new_full((), torch.nan)
        return {
            "kl_approx": masked_mean(-log_ratio, counted),
            "clip_fraction": masked_mean(((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype), counted),
            "ESS": effective_sample_size(log_ratio, counted),
            "entropy": masked_mean(scores.entropy, counted),
            "explained_variance": nan,
            "kl": nan,
        }


def _not_finite(given: dict[str, Tensor]) -> list[tuple[Tensor, str]]:
    """Where an entry is not finite, bool ``[N]``, and what a row has there."""
    return [
        (~value.isfinite(), f"{name} that is not finite at position {{position}}: {_SOURCES[name]}")
        for name, value in given.items()
        if name != "ref_log_prob"
    ]


def _bounds(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
    if not (0 <= low <= 1 and 0 <= high < math.inf):
        raise ValueError(f"clip_epsilon must be a number in [0, 1], or (low, high) at least 0, got {clip_epsilon}.")
    return float(low), float(high)
