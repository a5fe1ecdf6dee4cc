"""Proximal policy optimisation (PPO, arXiv 1707.06347) and its relatives for rows of tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn
from torchrl.objectives import ValueEstimators
from torchrl.objectives.utils import distance_loss
from torchrl.objectives.value import MultiAgentGAE, ValueEstimatorBase, VTrace

from torchrl_lang._checks import check_given, other_name, torchrl_names
from torchrl_lang.functional import kl_estimate, shift_left, turn_advantages, two_clock_advantages
from torchrl_lang.functional.advantages import Advantages, Bootstrap, standardized, with_known_values
from torchrl_lang.functional.decisions import begins_utterance, shift_right
from torchrl_lang.functional.kl import KLEstimator
from torchrl_lang.functional.value_terms import divisor, explained_variance
from torchrl_lang.modules.controllers import KLController
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.objectives.base import (
    LogitsChunk,
    Policy,
    RowLoss,
    TransitionBatch,
    ValueType,
    check_named,
    over_rows,
)
from torchrl_lang.objectives.networks import as_head, trained_params, values_at
from torchrl_lang.objectives.policy import TokenScores, kl_controller, reference_of, score_decisions, unwritable
from torchrl_lang.schema import ENGINE_LOG_PROB, RAW_REWARD, TOKEN_LOG_PROB

Aggregation = Literal["token_mean", "turn_mean", "prompt_mean"] | int
"""Mean over all tokens, or over turns or rows of the means over theirs; a number divides the sums of rows."""

_LARGEST_LOG_RATIO = 40.0
"""A product of ratios beyond it would overflow, and its gradient with it; far beyond every clipping range."""
_WITHOUT_VALUES = "write it with RowAdvantage.inv(rows) or ArCHerLoss.estimate(rows), as there is no value_network"
_ESTIMATED = ("advantage", "value_target", "state_value")
_SOURCES = {
    **dict.fromkeys(_ESTIMATED, "call loss.estimate(rows) once a batch, before the first epoch"),
    "engine_log_prob": "it is what an inference engine reported, beside the token_log_prob of the trainer's policy",
    "token_log_prob": "take it along from acting, rows_from_rollout(..., carry=['token_log_prob'])",
    "ref_log_prob": "have ReferenceModelLogProbTransform write it into the rows, or use kl_estimator='exact'",
}


class PPOLoss(RowLoss):
    r"""Proximal policy optimisation over rows of tokens, each token an action.

    At each decision ``j`` with state ``s_j`` and token ``a_j``, with ``b_j`` the log-probability that acting wrote down
    and ``rho_j = exp(log pi(a_j | s_j) - b_j)``::

        loss_objective = -mean_j min(rho_j A_j, clip(rho_j, 1 - eps, 1 + eps) A_j)     (arXiv 1707.06347, eq. 7)
        loss_critic    = value_weight   * mean_j (V(s_j) - G_j)^2
        loss_entropy   = -entropy_weight * mean_j H(pi(. | s_j))
        loss_kl        = kl_weight      * mean_j KL_j

    Relatives differ in the ratio, in its clipping and in the mean (the table in the guide on online training has their
    options). With ``ratio="turn"`` or ``"row"``, ``rho_j`` is that of the turn or row of ``j``: the geometric mean of
    the ratios of its tokens (GSPO, arXiv 2507.18071, eq. 7) or, with ``normalize_ratio=False``, their product. With
    ``surrogate="cispo"``, where ``sg`` has the gradient 0::

        loss_objective = -mean_j sg(clip(rho_j, 1 - eps, 1 + eps)) A_j log pi_j     (arXiv 2506.13585, eq. 4)

    A clipped token keeps its gradient there, which it has not in TorchRL's ``CISPOLoss``. The value that is returned is
    TorchRL's, without the last factor.

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
    ``rho * k``, the importance weight unclipped and gradients through both factors; the rows bring ``ref_log_prob``.
    ``"exact"`` sums over the vocabulary; its ``reference`` reads the rows in every call. That a token changes what
    follows is left out. A penalty on the rewards (:class:`~torchrl_lang.transforms.KLConstrainedTransform`) counts it:
    with ``estimator="k1"`` the token itself as well, so use one of the two; with ``"exact"`` only what follows, so the
    two together have the whole gradient.

    Args:
        actor_network: an :class:`~torchrl_lang.modules.UtteranceActor`, or a language actor that sampled its tokens at
            temperature 1 over the whole vocabulary.
        value_network: any module ``hidden [N, H] -> state_value [N, 1]`` or ``[N]``; None where advantages come from
            a :class:`~torchrl_lang.transforms.RowAdvantage`, which needs no values.

    Keyword Args:
        ratio: ``"token"``, ``"turn"`` or ``"row"``.
        normalize_ratio: the ratio of a turn or row is the geometric mean of its tokens' ratios, not their product.
        surrogate: ``"ppo"`` or ``"cispo"``.
        max_engine_weight: for tokens that an inference engine sampled, whose rows have ``engine_log_prob`` beside the
            trainer's ``token_log_prob``: ``A_j`` is multiplied by ``min(exp(b_j - engine_j), max_engine_weight)``,
            truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you
            off-policy RL training"; arXiv 2110.00641 for the two policies); None for no weights.
        aggregation: which mean the policy's terms are, with the names of TorchRL's ``GRPOLoss``: ``"token_mean"`` over
            all decisions; ``"turn_mean"`` or ``"prompt_mean"`` over turns or rows, of the means over their decisions;
            a number ``L``: the sum over all decisions divided by ``L`` and by the number of rows (Dr. GRPO, arXiv
            2503.20783); ``L`` only sets the scale, rows may be longer. By default the first for ratios of tokens, and
            those of turns and rows for theirs.
        turn_values: one value and one advantage for each turn, that of its first decision
            (:func:`~torchrl_lang.functional.turn_advantages`), so the critic learns there alone.
        value_trunk: a trunk of its own for the values; by default they read the actor's. It may read what the actor
            must not, see :class:`~torchrl_lang.modules.PrivilegedTrunk`.
        clip_epsilon: ``eps``, or ``(low, high)``.
        value_clip: how far a value may move from what :meth:`estimate` found before it gains nothing by moving on; None
            or False for no limit, True for ``clip_epsilon`` (``high``).
        value_weight, entropy_weight: weights of the terms; None for no term.
        entropy_bonus: as in TorchRL: False for no entropy term, True for one of weight 0.01 where none is given.
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
            deviation (``standardized``). By default if there is a ``value_network``.
        loss_critic_type: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        detach_value: no gradient from the values into the trunk.
        logits_chunk: decisions whose logits exist at a time; the backward pass computes them again. ``"auto"``: pieces
            of a few dozen megabytes where all would be more. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The names of :class:`torchrl.objectives.PPOLoss` are taken as well: ``critic_network`` for ``value_network``,
    ``critic_coeff`` for ``value_weight``, ``entropy_coeff``, ``clip_value``, and ``separate_losses`` for
    ``detach_value``. Defaults are those above.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``agent_mask`` (bool), ``token_log_prob``,
    ``advantage``, ``value_target`` (float), with ``value_clip`` ``state_value``, with a sampled divergence
    ``ref_log_prob`` and with ``max_engine_weight`` ``engine_log_prob``, each ``[*B, T]`` (numbers also ``[*B, T, 1]``),
    numbers at the tokens that the agent wrote. It is left as it was. The output holds the four losses and, detached,
    over the decisions that count: ``kl_approx`` (mean ``-log rho``), ``clip_fraction``, ``ESS`` (effective sample size,
    as a share), ``entropy`` (mean, in nats), ``explained_variance`` of the values (NaN without a critic) and ``kl``,
    the divergence of a row in nats (NaN without one).

    Raises:
        KeyError: an entry is missing; the message names its source.
        ValueError: an option is out of range, or about values without a ``value_network``; shapes differ, steps of a
            rollout came instead of rows, a number is not finite, an action that counts cannot be written by the policy,
            or there is a ``kl_weight`` and rows have ``raw_reward`` and ``ref_log_prob``: their rewards hold a penalty.

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
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and those of acting and estimating."""

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        token_log_prob: NestedKey = TOKEN_LOG_PROB
        ref_log_prob: NestedKey = "ref_log_prob"
        engine_log_prob: NestedKey = ENGINE_LOG_PROB

    default_keys = _AcceptedKeys
    default_value_estimator = ValueEstimators.GAE
    _estimators: Mapping[ValueEstimators, Mapping[str, Any]] = {
        ValueEstimators.GAE: {},
        ValueEstimators.TDLambda: {"average_gae": False},
        ValueEstimators.TD0: {"lmbda": 0.0, "turn_lmbda": 0.0, "average_gae": False},
        ValueEstimators.TD1: {"lmbda": 1.0, "turn_lmbda": 1.0, "average_gae": False},
    }
    _targets = "its targets are those that estimate(rows) writes"
    _sources = _SOURCES
    average_gae = False
    value_network: Any
    critic_network, critic_coeff = other_name("value_network"), other_name("value_weight")
    entropy_coeff, clip_value = other_name("entropy_weight"), other_name("value_clip")
    separate_losses = other_name("detach_value")
    _entropy_weight_on = 0.01  # the weight to which entropy_bonus=True returns
    # An estimator of TorchRL's in place of the two clocks; its numbers are no part of the state_dict.
    _their_estimator: ValueEstimatorBase | None = None
    out_keys = ["loss_objective", "loss_critic", "loss_entropy", "loss_kl"]
    out_keys += ["kl_approx", "clip_fraction", "ESS", "entropy", "explained_variance", "kl"]

    @torchrl_names(
        actor="actor_network",
        critic="value_network",
        critic_network="value_network",
        critic_coeff="value_weight",
        entropy_coeff="entropy_weight",
        clip_value="value_clip",
        separate_losses="detach_value",
    )
    def __init__(
        self,
        actor_network: Policy,
        value_network: nn.Module | None = None,
        *,
        ratio: Literal["token", "turn", "row"] = "token",
        normalize_ratio: bool = True,
        surrogate: Literal["ppo", "cispo"] = "ppo",
        max_engine_weight: float | None = None,
        aggregation: Aggregation | None = None,
        turn_values: bool = False,
        value_trunk: TensorDictModuleBase | None = None,
        clip_epsilon: float | tuple[float, float] = 0.2,
        value_clip: float | bool | None = None,
        value_weight: float | None = 0.5,
        entropy_weight: float | None = None,
        entropy_bonus: bool | None = None,
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
        normalize_advantage: bool | None = None,
        loss_critic_type: Literal["l2", "l1", "smooth_l1"] = "l2",
        detach_value: bool = False,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(actor_network, end_of_action=end_of_action, logits_chunk=logits_chunk, reduction=reduction)
        if value_network is not None:
            value_network = as_head(self, "value_network", value_network, value_trunk)
        else:
            terms = {"turn_values": turn_values, "value_trunk": value_trunk, "value_weight": value_weight or 0.5}
            terms |= {"value_clip": value_clip or None, "loss_critic_type": loss_critic_type, "bootstrap": bootstrap}
            clocks = {"gamma": gamma, "lmbda": lmbda, "turn_gamma": turn_gamma, "turn_lmbda": turn_lmbda}
            _refuse_of_values({**terms, **clocks, "detach_value": detach_value})
            self._sources = {**_SOURCES, "advantage": _WITHOUT_VALUES}
        if normalize_advantage is None:  # advantages of RowAdvantage are normalized by their method
            normalize_advantage = value_network is not None
        self.value_network = value_network
        self._set_options(ratio=ratio, normalize_ratio=normalize_ratio, surrogate=surrogate, turn_values=turn_values)
        means = {"token": "token_mean", "turn": "turn_mean", "row": "prompt_mean"}
        check_given(aggregation=(aggregation, means.values() if isinstance(aggregation, str) else 1))
        self.aggregation = means[ratio] if aggregation is None else aggregation
        self.value_trunk, self.detach_value = value_trunk, detach_value
        self._set_options(gamma=gamma, lmbda=lmbda, turn_gamma=turn_gamma, turn_lmbda=turn_lmbda)
        if entropy_weight is None and entropy_bonus:
            entropy_weight = self._entropy_weight_on
        value_weight = None if value_network is None else value_weight
        self.clip_epsilon, self.value_weight, self.entropy_weight = clip_epsilon, value_weight, entropy_weight
        if entropy_bonus is False:
            self.entropy_bonus = False
        self.value_clip = value_clip  # of clip_epsilon, if True
        self._set_options(loss_critic_type=loss_critic_type, normalize_advantage=normalize_advantage)
        self._set_options(bootstrap=bootstrap, kl_estimator=kl_estimator, max_engine_weight=max_engine_weight)
        self.kl_controller = kl_controller(kl_weight)
        exact = self.kl_controller is not None and kl_estimator == "exact"
        self.reference = reference_of(actor_network, reference, is_read=exact)
        self.embed_weights = embed_weights

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value_clip" and isinstance(value, bool):
            value = self.clip_epsilon[1] if value else None
        if name in ("value_weight", "entropy_weight") and value is None:
            value = 0.0
        if name in ("value_clip", "value_weight", "entropy_weight"):  # also where they are set later, by either name
            check_named(**{name: value})
        super().__setattr__(name, value)

    @property
    def entropy_bonus(self) -> bool:
        """Whether there is an entropy term: set to False its weight is 0, and to True what it was before, or 0.01."""
        return bool(self.entropy_weight)

    @entropy_bonus.setter
    def entropy_bonus(self, value: bool) -> None:
        self._entropy_weight_on = self.entropy_weight or self._entropy_weight_on
        self.entropy_weight = self._entropy_weight_on if value else 0.0

    @property
    def clip_epsilon(self) -> Any:
        """``(low, high)``; may be set to a number, too."""
        return self._clip_epsilon

    @clip_epsilon.setter
    def clip_epsilon(self, value: Any) -> None:
        low, high = value if isinstance(value, (tuple, list)) else (value, value)
        if not (0 <= low <= 1 and 0 <= high < math.inf):
            raise ValueError(f"clip_epsilon must be a number in [0, 1], or (low, high) at least 0, got {value}.")
        self._clip_epsilon = float(low), float(high)

    @property
    def _row_entries(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those that the terms read whose weights are not zero now: weights may be changed while training."""
        names: tuple[str, ...] = ("tokens", "attention_mask", "agent_mask", "token_log_prob", "advantage")
        if self.value_weight:
            names += ("value_target",) if self.value_clip is None else ("value_target", "state_value")
        names += () if self.max_engine_weight is None else ("engine_log_prob",)
        return names + ("ref_log_prob",) * (self.kl_controller is not None and self.kl_estimator != "exact")

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows, which holds what :meth:`estimate` wrote."""
        penalised = RAW_REWARD, self.tensor_keys.ref_log_prob  # the exact divergence in rewards leaves the first only
        if self.kl_controller is not None and all(key in tensordict.keys(True) for key in penalised):
            twice = "there is a penalty of log-ratios in their rewards, and kl_weight would count it a second time"
            raise ValueError(f"The rows have {' and '.join(map(repr, penalised))}: {twice}. Leave out one of the two.")
        batch = self._find(tensordict)
        counted = batch.counts
        entries = {name: tensordict.get(getattr(self.tensor_keys, name)) for name in self._row_entries[3:]}
        shape = batch.decision.shape  # entries of the agent's tokens at the decisions, [N]
        given = {key: shift_left(x.detach().reshape(shape)).flatten()[batch.place] for key, x in entries.items()}
        not_finite = [
            (~value.isfinite(), f"{name} that is not finite at position {{position}}: {self._sources[name]}")
            for name, value in given.items()
            if name != "ref_log_prob"
        ]
        self._refuse(batch, [*not_finite, *unwritable(self.scorer, batch)])
        rows = self._policy_trunk(batch.rows.copy())
        scores = score_decisions(self, batch, rows, entropy_gradient=bool(self.entropy_weight))
        # What does not count must not reach exp(): infinity there has no gradient that a mask could stop.
        log_rho = torch.where(counted, scores.log_prob - given["token_log_prob"], 0.0)
        log_ratio = log_rho if self.ratio == "token" else self._ratio_of(batch, log_rho)
        ratio, (low, high) = log_ratio.clamp(max=_LARGEST_LOG_RATIO).exp(), self.clip_epsilon
        a = standardized(given["advantage"], counted) if self.normalize_advantage else given["advantage"]
        if self.max_engine_weight is not None:
            weight = (given["token_log_prob"] - given["engine_log_prob"]).exp()
            a = a * weight.clamp(max=self.max_engine_weight)
        clipped = ratio.clamp(1 - low, 1 + high)
        if self.surrogate == "cispo":  # the last factor is 1, with the gradient of the log-ratio
            moved = torch.where(log_ratio.isfinite(), log_ratio, 0.0)
            objective = -clipped.detach() * a * (1 + moved - moved.detach())
        else:
            objective = -torch.minimum(ratio * a, clipped * a)
        losses = {"loss_objective": self._aggregate(objective, batch)}
        metrics = self._metrics(scores, log_ratio.detach(), counted) | {"kl_approx": -log_rho}
        if self.value_weight:
            value_rows = rows if self.value_trunk is None else self.value_trunk(batch.rows.copy())
            value = values_at(self, "value_network", value_rows, batch.place, detach=self.detach_value).squeeze(-1)
            error = distance_loss(given["value_target"], value, loss_function=self.loss_critic_type)
            if self.value_clip is not None:  # the larger one of it and the error of the clipped value
                old = given["state_value"]
                near = old + (value - old).clamp(-self.value_clip, self.value_clip)
                near_error = distance_loss(given["value_target"], near, loss_function=self.loss_critic_type)
                error = torch.maximum(error, near_error)
            valued = counted
            if self.turn_values:
                valued = counted & begins_utterance(batch.decision, self._turn_ends(batch)).flatten()[batch.place]
            losses["loss_critic"] = self.value_weight * self._reduce(error, batch, batch.place, valued)
            metrics["explained_variance"] = explained_variance(value.detach(), given["value_target"], valued)
        if self.entropy_weight:
            losses["loss_entropy"] = -self.entropy_weight * self._aggregate(scores.entropy, batch)
        if self.kl_controller is not None:
            kl = scores.kl
            if self.kl_estimator != "exact":
                kl = _corrected_kl(log_rho, scores.log_prob, given["ref_log_prob"], self.kl_estimator)
            losses["loss_kl"] = self.kl_controller(kl.dtype) * self._aggregate(kl, batch)
            played = batch.at_decisions(counted.float()).any(-1)
            metrics["kl"] = torch.where(counted, kl.detach(), 0.0).sum() / divisor(played)
        return self._output(batch, losses, metrics)

    def _total(self, batch: TransitionBatch, unit: str, values: Tensor) -> Tensor:
        """The sum over the decisions of the turn or row of each decision, ``[N] -> [N]``."""
        number = batch.place // batch.decision.shape[1]
        if unit == "turn":
            ends = batch.last | self._turn_ends(batch).flatten()[batch.place]
            number = ends.cumsum(0) - ends.long()
        return values.new_zeros(batch.decision.numel()).index_add(0, number, values)[number]

    def _ratio_of(self, batch: TransitionBatch, log_rho: Tensor) -> Tensor:
        """The logarithm of the ratio of each decision's turn or row, ``[N]``; ``log_rho`` is 0 where none counts."""
        total = self._total(batch, self.ratio, log_rho)
        if not self.normalize_ratio:
            return total
        return total / self._total(batch, self.ratio, batch.counts.to(total.dtype)).clamp_min(1)

    def _aggregate(self, values: Tensor, batch: TransitionBatch) -> Tensor:
        """Reduce a term of the policy, ``[N]``, to its mean by ``aggregation``, where ``reduction`` is a mean."""
        if self.reduction != "mean" or self.aggregation == "token_mean":
            return self._reduce_decisions(values, batch)
        values = torch.where(batch.counts, values, 0)
        if not isinstance(self.aggregation, str):
            return values.sum() / (self.aggregation * divisor(torch.ones_like(batch.row_terminated)))
        counted = batch.counts.to(values.dtype)
        unit = "turn" if self.aggregation == "turn_mean" else "row"
        share = counted / self._total(batch, unit, counted).clamp_min(1)  # the sum of the shares is the number of units
        return (share * values).sum() / divisor(share)

    @torch.no_grad()
    def _metrics(self, scores: TokenScores, log_ratio: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """How far the policy has moved, over the decisions that count."""
        ratio, (low, high) = log_ratio.exp(), self.clip_epsilon
        # The effective sample size as a share, (sum rho)**2 / (n sum rho**2): 1 where all weigh alike, 0 where none is.
        weights = torch.where(counted, log_ratio, -torch.inf)
        size = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp()
        return {
            "clip_fraction": ((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype),
            "ESS": torch.where(counted.any(), size / counted.sum().clamp_min(1), 0.0),
            "entropy": scores.entropy,
        }

    @property
    def value_network_params(self) -> TensorDictParams | None:
        """Parameters of the value head, without its trunk: a group of an optimizer; None without a value network."""
        return None if self.value_network is None else trained_params(self.value_network)

    critic_network_params = value_network_params

    # -- estimates, once a batch ---------------------------------------------------------------------------------------

    def make_value_estimator(
        self, value_type: ValueType = None, *, device: Any = None, differentiable: bool = False, **hyperparams: Any
    ) -> Self:
        """Choose the estimator of :meth:`estimate` by TorchRL's names, or give one of TorchRL's own.

        A class, built with ``hyperparams``, or an instance of :class:`~torchrl.objectives.value.ValueEstimatorBase`
        computes with its own numbers, and one clock: each decision is a step ``[1, N, 1]``, the rows' trajectories one
        after another, ``done`` at a row's last decision. States are valued by this loss, not by its ``value_network``.

        Args:
            value_type: ``ValueEstimators.GAE`` (the default), ``TDLambda``, ``TD0`` or ``TD1``; a class or an instance.
            device: where a class puts its numbers; they follow the rows.
            differentiable: estimates have no gradients.
            **hyperparams: ``gamma``, ``turn_gamma`` and, where the estimator leaves them open, ``lmbda`` and
                ``turn_lmbda``, each as it was where it is not given; ``average_gae=True`` of GAE standardizes the
                advantages over all decisions of a batch (``standardized``). Of a class:
                its own.

        Raises:
            NotImplementedError: an estimator that needs more than values and rewards (``VTrace``, ``MultiAgentGAE``,
                ``auto_reset_env``), another one that the loss has not, or ``differentiable`` is True.
            ValueError: a number lies outside [0, 1].
            TypeError: a hyperparameter is unknown.

        Examples:
            >>> from torchrl.objectives.value import GAE
            >>> from torchrl_lang.modules import ValueHead, causal_lm, language_actor, value_module
            >>> from torchrl_lang.objectives import PPOLoss
            >>> lm = causal_lm(vocab_size=12, layers=1, width=8, heads=2, max_length=8)
            >>> loss = PPOLoss(language_actor(lm), value_module(ValueHead(8)))
            >>> loss.make_value_estimator(GAE(gamma=0.99, lmbda=0.95, value_network=None)).value_type.__name__
            'GAE'
            >>> loss.value_estimator.out_keys
            ['advantage', 'value_target', 'state_value']
        """
        kind = value_type if isinstance(value_type, type) else type(value_type)
        if not issubclass(kind, ValueEstimatorBase):
            super().make_value_estimator(value_type, device=device, differentiable=differentiable, **hyperparams)
            self._their_estimator, self.average_gae = None, bool(hyperparams.get("average_gae"))
            return self
        if issubclass(kind, VTrace | MultiAgentGAE):
            needs = "log-probabilities of its own actor" if issubclass(kind, VTrace) else "a dimension of agents"
            raise NotImplementedError(f"PPOLoss has no {kind.__name__}: it needs {needs}, rows have none. Use GAE.")
        found: Any = value_type
        self._refuse_gradients(differentiable or getattr(found, "differentiable", False))
        if isinstance(found, type):
            found = found(**{"value_network": None, "device": device, **hyperparams})
        elif hyperparams:
            raise TypeError(f"A {kind.__name__} has its own hyperparameters, got {sorted(hyperparams)} as well.")
        if getattr(found, "auto_reset_env", False):
            raise NotImplementedError("PPOLoss has no auto_reset_env=True, rows end with a state: leave it out.")
        # Around nn.Module.__setattr__, which would make it a part of the loss's state_dict.
        self.__dict__["_their_estimator"], self.average_gae, self.value_type = found, False, kind
        return self

    @property
    def value_estimator(self) -> TensorDictModuleBase:
        """A module that writes advantages and targets into rows, :meth:`estimate`: ``loss.value_estimator(rows)``."""
        return _Estimator(self)

    @torch.no_grad()
    def estimate(self, rows: TensorDictBase, *, reuse_values: bool = False) -> TensorDictBase:
        """Write ``advantage``, ``value_target`` and ``state_value`` into ``rows``, each float ``[*B, T]``.

        They are written at the agent's tokens, zero elsewhere, after one pass of the values' trunk in evaluation mode
        without gradients.

        Args:
            rows: the entries of a row and ``terminated`` ``[*B, 1]``: a row that is not terminated is bootstrapped from
                its last position.
            reuse_values: the rows have ``state_value`` already, carried along from acting; only rows that are not
                terminated are read, for the value of their last position. NaN stands for a state that was not read,
                that of a certain last slot or of another player's token: it is worth what follows it, the reward and
                the discounted value of the next state.

        Returns:
            The same ``rows``; without any, three entries without any.

        Raises:
            KeyError: an entry is missing.
            ValueError: values of the rows make no sense, see :func:`~torchrl_lang.schema.check_values`, or the loss has
                no ``value_network``.
        """
        if self.value_network is None:
            raise ValueError("PPOLoss has no value_network: give it one, or advantages of transforms.RowAdvantage.")
        tokens = rows.get(self.tensor_keys.tokens, None)
        if tokens is not None and not tokens.numel():
            nothing = torch.zeros(tokens.shape, device=tokens.device)
            return rows.update({getattr(self.tensor_keys, name): nothing.clone() for name in _ESTIMATED})
        batch = self._find(rows, RowLoss._row_entries)  # with rewards and ends, which the loss itself does not read
        last = (batch.attention_mask.sum(-1) - 1).clamp_min(0)  # the last real position of each row, [B]
        with eval_mode(self):
            if reuse_values:
                value = shift_left(rows[self.tensor_keys.state_value].reshape(batch.decision.shape))
                last_value = self._last_values(batch, last)
            else:
                states = self._value_trunk(batch.rows.copy())
                value = values_at(self, "value_network", states, batch.state_place).squeeze(-1)
                value = batch.at_decisions(value, batch.state_place)
                last_value = value.gather(-1, last[:, None]).squeeze(-1)
        last_value, ends = torch.where(batch.row_terminated, 0.0, last_value), self._turn_ends(batch)
        gammas: dict[str, Any] = {"gamma": 1.0 if self.turn_values else self.gamma, "turn_gamma": self.turn_gamma}
        lambdas: dict[str, Any] = {"lmbda": self.lmbda, "turn_lmbda": self.turn_lmbda, "bootstrap": self.bootstrap}
        reward = batch.next_reward.to(value.dtype)
        if self._their_estimator is not None:
            gammas = dict.fromkeys(gammas, getattr(self._their_estimator, "gamma", self.gamma))
        value = with_known_values(value, reward, last_value, batch.decision, ends, **gammas)
        if self._their_estimator is not None:
            found = _by_torchrl(self._their_estimator, batch, value, last_value)
        elif self.turn_values:
            entries = reward, value, last_value, batch.decision, ends
            found = turn_advantages(*entries, gamma=gammas["turn_gamma"], lmbda=lambdas["turn_lmbda"])
        else:
            found = two_clock_advantages(reward, value, last_value, batch.decision, ends, **gammas, **lambdas)
        if self.average_gae:
            found = found._replace(advantage=standardized(found.advantage, batch.decision))
        for name, dense in zip(_ESTIMATED, (*found, torch.where(batch.decision, value, 0.0)), strict=True):
            rows.set(getattr(self.tensor_keys, name), shift_right(dense).reshape(batch.shape))
        return rows

    def _last_values(self, batch: TransitionBatch, last: Tensor) -> Tensor:
        """V of the last position of the rows that are not terminated, ``[B]``; zero for the others."""
        going_on = (~batch.row_terminated).nonzero().squeeze(-1)
        out = torch.zeros(batch.decision.shape[0], device=going_on.device)
        if not going_on.shape[0]:
            return out
        states = self._value_trunk(batch.rows[going_on].copy())
        place = torch.arange(going_on.shape[0], device=going_on.device) * batch.decision.shape[1]
        value = values_at(self, "value_network", states, place + last[going_on]).squeeze(-1)
        return out.to(value.dtype).index_copy(0, going_on, value)


class _Estimator(TensorDictModuleBase):
    """The estimates of a :class:`PPOLoss` as a module, as losses of TorchRL have one."""

    def __init__(self, loss: PPOLoss) -> None:
        super().__init__()
        self.__dict__["loss"] = loss  # no part of this module
        self.set_keys()

    @property
    def tensor_keys(self) -> Any:
        """Names of entries: those of the loss."""
        return self.loss.tensor_keys

    def set_keys(self, **keys: NestedKey) -> None:
        """Name entries of the loss, and so of its estimates."""
        self.loss.set_keys(**keys)
        names = (*RowLoss._row_entries, *(("features",) if self.loss._reads_features else ()))
        self.in_keys, self.out_keys = ([getattr(self.tensor_keys, n) for n in group] for group in (names, _ESTIMATED))

    @dispatch
    def forward(self, tensordict: TensorDictBase, *, params: Any = None, target_params: Any = None) -> TensorDictBase:
        """Call :meth:`PPOLoss.estimate`; ``params`` and ``target_params`` are accepted, as in TorchRL, if its own."""
        given = [found for found in (params, target_params) if found is not None]
        own = self.loss.value_network_params if given else None
        compared = () if own is None else (*given, own)
        places = [{weight.data_ptr() for weight in found.values(True, True)} for found in compared]
        if any(found != places[-1] for found in places):
            raise NotImplementedError("PPOLoss values rows by its own value_network: leave out other params.")
        return self.loss.estimate(tensordict)


def _refuse_of_values(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options about values that differ from their defaults, where there are no values."""
    defaults = inspect.signature(PPOLoss).parameters
    if given := [name for name, value in options.items() if value != defaults[name].default]:
        raise ValueError(f"{', '.join(given)}: about values, so give a value_network, too.")


def _by_torchrl(estimator: Any, batch: TransitionBatch, value: Tensor, last_value: Tensor) -> Advantages:
    """Estimates by a module of TorchRL's, whose steps are the decisions of all rows, ``[1, N, 1]``, without padding."""
    v = value.flatten()[batch.place]
    if not v.shape[0]:
        return Advantages(torch.zeros_like(value), torch.zeros_like(value))
    estimator = copy(estimator)
    vars(estimator).update(value_network=None, time_dim=None)  # the values are known, the time is dimension 1
    keys, row = estimator.tensor_keys, batch.place // value.shape[1]
    following = {keys.value: torch.where(batch.last, last_value[row], v.roll(-1)), keys.reward: batch.reward.to(v)}
    following |= {keys.done: batch.last, keys.terminated: batch.terminated}
    steps = TensorDict(batch_size=[1, v.shape[0]], device=v.device).set(keys.value, v[None, :, None])
    for key, entry in following.items():
        steps.set(("next", key), entry[None, :, None])
    groups = None if estimator.group_key is None else batch.rows.get(estimator.group_key, None)
    if groups is not None:  # of rows, within which it standardizes
        steps.set(estimator.group_key, groups.reshape(value.shape[0])[row][None])
    out = estimator(steps)
    return Advantages(*(batch.at_decisions(out.get(key).flatten()) for key in (keys.advantage, keys.value_target)))


def _corrected_kl(log_rho: Tensor, log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator) -> Tensor:
    """``rho * k(log pi, log ref)``: ``KL(pi || ref)`` from what another policy did, with its exact gradient.

    The importance weight ``rho = pi / b`` makes the mean over samples of ``b`` that over ``pi``, and its gradient joins
    that of the estimate: ``E_b[rho k] = sum_a pi(a) k(a)``, differentiated through every ``pi``. With k1 and k3 that is
    the divergence of one decision and its exact gradient, with k2 ``E_pi[log(pi / ref)**2] / 2``. k3 varies less near
    the reference, and needs a policy that gives probability to all tokens that the reference can sample.
    """
    # Where the token has no probability both factors are zero, and so is the gradient.
    possible = log_prob.isfinite()
    rho = torch.where(possible, log_rho, -torch.inf).exp()
    return rho * kl_estimate(torch.where(possible, log_prob, 0.0), torch.where(possible, ref_log_prob, 0.0), estimator)
