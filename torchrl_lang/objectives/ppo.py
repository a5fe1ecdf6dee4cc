"""Proximal policy optimisation (PPO, arXiv 1707.06347) for rows of tokens, one pass of the trunk a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor

from torchrl_lang.functional import (
    Advantages,
    Bootstrap,
    KLEstimator,
    masked_mean,
    row_length,
    shift_left,
    shift_right,
    standardized,
    turn_end_mask,
    two_clock_advantages,
    with_known_values,
)
from torchrl_lang.functional.checks import one_of, within
from torchrl_lang.functional.precision import widened
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.modes import evaluating
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.objectives.ppo_terms import (
    clipped_objective,
    corrected_kl,
    effective_sample_size,
    explained_variance,
    value_loss,
)
from torchrl_lang.objectives.rows import DecisionBatch, LogitsChunk, RowLoss, gather_inputs
from torchrl_lang.objectives.said import (
    Said,
    checked_reference,
    read_reference,
    row_batch,
    score_decisions,
    utterance_end,
)
from torchrl_lang.transforms.controllers import KLController, as_controller
from torchrl_lang.transforms.frozen import FrozenActor

__all__ = ["PPOLoss"]

_METRICS = ("kl_approx", "clip_fraction", "ESS", "entropy", "explained_variance", "kl")

_ESTIMATED = "call loss.estimate(rows) once a batch, before the first epoch"
_ADVICE = {
    "token_log_prob": "take it along from acting, rows_from_rollout(..., carry=['token_log_prob'])",
    "advantage": _ESTIMATED,
    "value_target": _ESTIMATED,
    "state_value": _ESTIMATED,
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

    Every output whose name begins with ``loss_`` is already weighted: a training step minimises their sum. A term of
    weight zero is not computed and comes out as zero.

    ``A`` and ``G`` are estimated once a batch by :meth:`estimate`, with two clocks, one inside an utterance and one
    across turns (:func:`~torchrl_lang.functional.two_clock_advantages`), and reused by every epoch. ``b`` is never
    recomputed. The loss scores the very distribution that acting drew from: given an
    :class:`~torchrl_lang.modules.UtteranceActor`, with its temperature, filters, forbidden tokens and certain last
    slot. So on fresh data ``rho`` is 1, up to rounding, if the model acts as it learns: decoding runs in evaluation
    mode, so a model with dropout should learn in evaluation mode, too.

    The divergence from a reference is ``KL(pi(. | s_j) || ref(. | s_j))`` of one decision, in expectation over what was
    said, with its exact gradient. ``"k1"``, ``"k2"``, ``"k3"`` estimate it from the token that was said, as
    ``rho * k``, the importance weight unclipped and gradients through both factors
    (:func:`~torchrl_lang.objectives.ppo_terms.corrected_kl`); the rows bring ``ref_log_prob``. ``"exact"`` sums over
    the vocabulary; its ``reference`` reads the rows in every call. That a token changes what follows is left to the
    advantages: for that, keep the reward near the reference as well
    (:class:`~torchrl_lang.transforms.KLConstrainedTransform`).

    Args:
        actor_network: an :class:`~torchrl_lang.modules.UtteranceActor`, or a language actor that said its tokens at
            temperature 1 over the whole vocabulary.
        value_network: ``hidden [N, H] -> state_value [N, 1]``.

    Keyword Args:
        value_trunk: a trunk of its own for the values; by default they read the actor's.
        clip_epsilon: ``eps``, or ``(low, high)``.
        value_clip: how far a value may move from what :meth:`estimate` found before it gains nothing by moving on; None
            for no limit.
        value_weight, entropy_weight: weights of the terms.
        kl_weight: weight of the divergence, a number or a :class:`~torchrl_lang.transforms.KLController`, which the
            training loop updates by the metric ``kl``.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"exact"``.
        reference: for ``"exact"``: :func:`~torchrl_lang.transforms.frozen_copy` or
            :func:`~torchrl_lang.transforms.adapters_off` of the actor. It is neither among the parameters nor in the
            ``state_dict``.
        gamma, lmbda: discount and trust inside an utterance.
        turn_gamma, turn_lmbda: across turns.
        bootstrap: what a turn is worth to the one before it: ``"first"``, the value of its first decision, or
            ``"mean"``, the mean over its decisions.
        end_of_action: id of the token that ends an utterance, known of an ``UtteranceActor``: tells turns apart where
            the environment stays silent (:func:`~torchrl_lang.functional.turn_end_mask`).
        normalize_advantage: standardise the advantages over the decisions of each batch that count.
        loss_critic_type: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        detach_value: no gradient from the values into the trunk.
        logits_chunk: decisions whose logits exist at a time; the backward pass computes them again. ``"auto"``: pieces
            of a few dozen megabytes where all would be more. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``action_mask`` (bool), ``token_log_prob``,
    ``advantage``, ``value_target`` (float), with ``value_clip`` ``state_value`` and with a sampled divergence
    ``ref_log_prob``, each ``[*B, T]``, numbers at the tokens that the agent wrote. It is left as it was. The output
    holds the four losses and, detached, over the decisions that count: ``kl_approx`` (mean ``-log rho``),
    ``clip_fraction``, ``ESS`` (effective sample size, as a share), ``entropy`` (mean, in nats), ``explained_variance``
    of the values (NaN without a critic) and ``kl``, the divergence of a row in nats (NaN without one).

    Raises:
        KeyError: an entry is missing; the message says where it comes from.
        ValueError: an option is out of range, shapes differ, or steps of a rollout came instead of rows.

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

        token_log_prob: NestedKey = "token_log_prob"
        ref_log_prob: NestedKey = "ref_log_prob"
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        state_value: NestedKey = "state_value"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    actor_network: UtteranceActor | ProbabilisticTensorDictSequential
    value_network: TensorDictModule
    value_trunk: TensorDictModule | None
    kl_controller: KLController | None
    out_keys = ["loss_objective", "loss_critic", "loss_entropy", "loss_kl", *_METRICS]

    def __init__(
        self,
        actor_network: UtteranceActor | ProbabilisticTensorDictSequential,
        value_network: TensorDictModule,
        *,
        value_trunk: TensorDictModule | None = None,
        clip_epsilon: float | tuple[float, float] = 0.2,
        value_clip: float | None = None,
        value_weight: float = 0.5,
        entropy_weight: float = 0.0,
        kl_weight: float | KLController = 0.0,
        kl_estimator: KLEstimator | Literal["exact"] = "k1",
        reference: FrozenActor | None = None,
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
        clocks = {"gamma": gamma, "lmbda": lmbda, "turn_gamma": turn_gamma, "turn_lmbda": turn_lmbda}
        for name, number in clocks.items():
            within(name, number, 0, 1)
        one_of("bootstrap", bootstrap, ("first", "mean"))
        one_of("loss_critic_type", loss_critic_type, ("l2", "l1", "smooth_l1"))
        one_of("kl_estimator", kl_estimator, ("k1", "k2", "k3", "exact"))
        self.actor_network, self.value_network, self.value_trunk = actor_network, value_network, value_trunk
        if self.scorer.has_values:
            raise ValueError("PPOLoss trains what a language model says by itself: build the actor without guidance=.")
        self.clip_epsilon, self.value_clip = _bounds(clip_epsilon), value_clip
        self.value_weight, self.entropy_weight = value_weight, entropy_weight
        none = not isinstance(kl_weight, KLController) and float(kl_weight) == 0
        self.kl_controller = None if none else as_controller(kl_weight)
        self.kl_estimator = kl_estimator
        exact = self.kl_controller is not None and kl_estimator == "exact"
        if reference is not None and not exact:
            raise ValueError("A reference is read with a kl_weight and kl_estimator='exact' alone: give both or none.")
        self.reference = checked_reference(actor_network, reference) if exact else None
        self.gamma, self.lmbda, self.turn_gamma, self.turn_lmbda = gamma, lmbda, turn_gamma, turn_lmbda
        self.bootstrap = bootstrap
        self.end_of_action = end_of_action
        self.normalize_advantage = normalize_advantage
        self.loss_critic_type, self.detach_value = loss_critic_type, detach_value
        self._row_entries = self._entries_read()

    # -- set-up ----------------------------------------------------------------------------------------------------

    @property
    def scorer(self) -> RowScorer:
        """What says how likely the agent's tokens are, as the actor acts."""
        return RowScorer(self.actor_network)

    def _entries_read(self) -> tuple[str, ...]:
        """The entries that ``forward`` reads with these options."""
        wanted = {
            "value_target": bool(self.value_weight),
            "state_value": bool(self.value_weight) and self.value_clip is not None,
            "ref_log_prob": self.kl_controller is not None and self.kl_estimator != "exact",
        }
        always = ("tokens", "attention_mask", "action_mask", "token_log_prob", "advantage")
        return (*always, *(name for name, is_read in wanted.items() if is_read))

    # -- advantages, once a batch ----------------------------------------------------------------------------------

    @torch.no_grad()
    def estimate(self, rows: TensorDictBase, *, reuse_values: bool = False) -> TensorDictBase:
        """Write ``advantage``, ``value_target`` and ``state_value`` into ``rows``, each float ``[*B, T]``.

        They stand at the tokens that the agent wrote, zero elsewhere: what a token earned beyond what its state was
        worth, what its state turned out to be worth, and what it was thought to be worth. One pass of the values' trunk
        in evaluation mode, without gradients.

        Args:
            rows: the entries of a row and ``terminated`` ``[*B, 1]``: a row that is not terminated is bootstrapped from
                its last position.
            reuse_values: the rows have ``state_value`` already, carried along from acting; only rows that are not
                terminated are read, for the value of their last position. NaN stands for a state that was not read,
                that of a certain last slot or of another player's token: it is worth what follows it
                (:func:`~torchrl_lang.functional.with_known_values`).

        Returns:
            The same ``rows``.

        Raises:
            KeyError: an entry is missing.
        """
        reader = RowLoss()  # reads rewards and ends, which the loss itself does not
        reader.set_keys(**{name: getattr(self.tensor_keys, name) for name in RowLoss._row_entries})
        batch = reader._find(rows)
        modules = [self.actor_network, self.value_network]
        with evaluating(torch.nn.ModuleList(modules if self.value_trunk is None else [*modules, self.value_trunk])):
            if reuse_values:
                value, last_value = self._acted_values(rows, batch), self._last_values(batch)
            else:
                value = self._values(self._value_states(batch.rows), batch.state_place)
                value = batch.scatter(value, batch.state_place)
                last_value = value.gather(-1, _last(batch)[:, None]).squeeze(-1)
        value, found = self._advantages(value, torch.where(batch.row_terminated, 0.0, last_value), batch)
        values = {
            "advantage": found.advantage,
            "value_target": found.value_target,
            "state_value": torch.where(batch.decision, value, 0.0),
        }
        for name, dense in values.items():
            rows.set(getattr(self.tensor_keys, name), shift_right(dense).reshape(batch.shape))
        return rows

    def _advantages(self, value: Tensor, last_value: Tensor, batch: DecisionBatch) -> tuple[Tensor, Advantages]:
        """The decisions' values, all of them known, ``[B, T]``, and their advantages."""
        agent = shift_right(batch.decision)
        ends = turn_end_mask(batch.attention_mask, agent, batch.rows.get(self.tensor_keys.tokens), self._end_of_action)
        reward, gammas = batch.next_reward.to(value.dtype), {"gamma": self.gamma, "turn_gamma": self.turn_gamma}
        value = with_known_values(value, reward, last_value, batch.decision, ends, **gammas)
        advantages = two_clock_advantages(
            reward,
            value,
            last_value,
            batch.decision,
            ends,
            lmbda=self.lmbda,
            turn_lmbda=self.turn_lmbda,
            bootstrap=self.bootstrap,
            **gammas,
        )
        return value, advantages

    def _acted_values(self, rows: TensorDictBase, batch: DecisionBatch) -> Tensor:
        """V at the decisions, as acting wrote it, ``[B, T]``."""
        key = self.tensor_keys.state_value
        acted = rows.get(key, None)
        if acted is None:
            raise KeyError(
                f"reuse_values=True needs {key!r} in the rows, they have {sorted(map(str, rows.keys(True)))}: carry it "
                "from acting, rows_from_rollout(..., carry=[...]), or have the values computed."
            )
        return shift_left(acted.reshape(batch.decision.shape))

    def _last_values(self, batch: DecisionBatch) -> Tensor:
        """V of the last position of the rows that are not terminated, ``[B]``; zero for the others."""
        going_on = (~batch.row_terminated).nonzero().squeeze(-1)
        out = torch.zeros(batch.decision.shape[0], device=going_on.device)
        if not going_on.shape[0]:
            return out
        states = self._value_states(batch.rows[going_on])
        place = torch.arange(going_on.shape[0], device=going_on.device) * batch.decision.shape[1]
        last = self._values(states, place + _last(batch)[going_on])
        return out.to(last.dtype).index_copy(0, going_on, last)

    @property
    def _end_of_action(self) -> int | None:
        ends = utterance_end(self.actor_network)
        return self.end_of_action if self.end_of_action is not None or ends is None else ends[0]

    def _value_states(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with what the values' trunk makes of them."""
        trunk = split_actor(self.scorer.language_actor).trunk if self.value_trunk is None else self.value_trunk
        return trunk(rows.copy())

    def _values(self, states: TensorDictBase, place: Tensor) -> Tensor:
        """V at places of the flattened batch, ``[N]``."""
        inputs = gather_inputs(self.value_network, states, place)
        out = self.value_network(inputs.detach() if self.detach_value else inputs)
        return widened(out.get(self.value_network.out_keys[0]).squeeze(-1))

    # -- the loss --------------------------------------------------------------------------------------------------

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows, which holds what :meth:`estimate` wrote."""
        batch = self._find(tensordict)
        counted = torch.ones_like(batch.last) if batch.counted is None else batch.counted
        given = {name: self._given(tensordict, name, batch) for name in self._row_entries if name in _ADVICE}
        states = split_actor(self.scorer.language_actor).trunk(batch.rows.copy())
        said = self._said(batch, states)
        # What does not count must not reach exp(): infinity there has no gradient that a mask could stop.
        log_ratio = torch.where(counted, said.log_prob - given["token_log_prob"], 0.0)
        advantage = given["advantage"]
        if self.normalize_advantage:
            advantage = standardized(advantage, counted)
        zero = log_ratio.new_zeros(batch.shape if self.reduction == "none" else ())
        metrics = self._metrics(said, log_ratio, counted)
        out = {"loss_critic": zero, "loss_entropy": zero, "loss_kl": zero}
        out["loss_objective"] = self._reduce_decisions(
            clipped_objective(log_ratio, advantage, self.clip_epsilon), batch
        )
        if self.value_weight:
            value = self._values(states if self.value_trunk is None else self._value_states(batch.rows), batch.place)
            error = value_loss(
                value, given["value_target"], self.loss_critic_type, given.get("state_value"), self.value_clip
            )
            out["loss_critic"] = self.value_weight * self._reduce_decisions(error, batch)
            metrics["explained_variance"] = explained_variance(value.detach(), given["value_target"], counted)
        if self.entropy_weight:
            out["loss_entropy"] = -self.entropy_weight * self._reduce_decisions(said.entropy, batch)
        if self.kl_controller is not None:
            kl = self._kl(said, log_ratio, given)
            out["loss_kl"] = self.kl_controller() * self._reduce_decisions(kl, batch)
            rows = batch.scatter(counted.float()).any(-1).sum().clamp_min(1)
            metrics["kl"] = torch.where(counted, kl.detach(), 0.0).sum() / rows
        return TensorDict({**out, **metrics})

    def _entries(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        try:
            return super()._entries(tensordict)
        except KeyError as error:
            missing = [
                name for name in self._row_entries if tensordict.get(getattr(self.tensor_keys, name), None) is None
            ]
            advice = [f"{name}: {_ADVICE[name]}" for name in missing if name in _ADVICE]
            if not advice:
                raise
            raise KeyError(f"{error.args[0]} {'; '.join(advice)}.") from None

    def _given(self, tensordict: TensorDictBase, name: str, batch: DecisionBatch) -> Tensor:
        """An entry of the agent's tokens at the decisions, ``[N]``."""
        entry = tensordict.get(getattr(self.tensor_keys, name))
        return shift_left(entry.detach().reshape(batch.decision.shape)).flatten()[batch.place]

    def _said(self, batch: DecisionBatch, states: TensorDictBase) -> Said:
        scorer, rows = self.scorer, row_batch(batch, batch.rows.get(self.tensor_keys.tokens))
        return score_decisions(
            scorer,
            rows,
            {key: states.get(key) for key in split_actor(scorer.language_actor).trunk.out_keys},
            entropy_gradient=bool(self.entropy_weight),
            reference=None if self.reference is None else read_reference(self.reference, rows),
            logits_chunk=self.logits_chunk,
        )

    def _kl(self, said: Said, log_ratio: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Divergence from the reference at each decision, ``[N]``."""
        if self.kl_estimator == "exact":
            assert said.kl is not None
            return said.kl
        return corrected_kl(log_ratio, said.log_prob, given["ref_log_prob"], self.kl_estimator)

    @torch.no_grad()
    def _metrics(self, said: Said, log_ratio: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """What says how far the policy has moved, over the decisions that count."""
        low, high = self.clip_epsilon
        ratio = log_ratio.exp()
        nan = log_ratio.new_full((), torch.nan)
        return {
            "kl_approx": masked_mean(-log_ratio, counted),
            "clip_fraction": masked_mean(((ratio < 1 - low) | (ratio > 1 + high)).to(ratio.dtype), counted),
            "ESS": effective_sample_size(log_ratio, counted),
            "entropy": masked_mean(said.entropy, counted),
            "explained_variance": nan,
            "kl": nan,
        }


def _last(batch: DecisionBatch) -> Tensor:
    """The last real position of each row, int64 ``[B]``."""
    return (row_length(batch.attention_mask) - 1).clamp_min(0)


def _bounds(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
    if not 0 <= low <= 1 or high < 0:
        raise ValueError(f"clip_epsilon must be a number in [0, 1], or (low, high) at least 0, got {clip_epsilon}.")
    return float(low), float(high)
