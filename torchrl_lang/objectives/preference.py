"""Losses of which rows are better: DPO (arXiv 2305.18290), IPO (arXiv 2310.12036) and KTO (arXiv 2402.01306)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, sigmoid

from torchrl_lang import schema
from torchrl_lang._checks import check_options
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.value_terms import masked_mean
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.head_values import States
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.objectives.base import LogitsChunk, Policy, RowLoss, TransitionBatch, over_rows
from torchrl_lang.objectives.policy import only_scaled, over_decisions, reference_of, unwritable

# Each loss of pairs names them: TorchRL makes its own of those of a class.
_OF_PAIRS = ["loss_actor", "chosen_reward", "rejected_reward", "margin", "accuracy"]


class RowRatios(NamedTuple):
    """How much likelier the policy makes each of ``B`` rows than the reference does."""

    sum: Tensor
    """``[B]``: ``l``, the log-ratios of the agent's tokens that count, added up; 0 where none counts."""
    number: Tensor
    """``[B]``: how many tokens those are."""
    counts: Tensor
    """bool ``[B]``: whether there is one."""


class PreferenceLoss(RowLoss):
    """Base of the losses that make whole rows more or less likely than a reference does. Abstract.

    The environment's tokens never count, whatever the number of turns: ``l = sum_j log pi(a_j | s_j) - log ref(a_j |
    s_j)`` over the agent's tokens of a row that count.
    """

    @dataclass
    class _AcceptedKeys(RowLoss._AcceptedKeys):
        """Those of rows, the reference's log-probabilities and the labels of rows."""

        ref_log_prob: NestedKey = "ref_log_prob"
        desirable: NestedKey = "desirable"

    default_keys = _AcceptedKeys
    _sources = {
        "ref_log_prob": "give the loss its reference, or have ReferenceModelLogProbTransform write it into the rows",
        "desirable": "label each row, bool, such as (row_returns(rows) > 0)[:, None]",
    }

    def __init__(
        self,
        actor_network: Policy,
        reference: FrozenActor | None = None,
        *,
        beta: float = 0.1,
        embed_weights: bool = False,
        logits_chunk: LogitsChunk = "auto",
        reduction: str | None = None,
    ) -> None:
        super().__init__(actor_network, logits_chunk=logits_chunk, reduction=reduction)
        self.reference = reference_of(actor_network, reference, is_read=reference is not None)
        self.embed_weights = embed_weights
        only_scaled(self, actor_network, *(() if reference is None else (reference.actor,)))
        self._set_options(beta=beta)

    @property
    def _row_entries(self) -> tuple[str, ...]:  # type: ignore[override]
        names: tuple[str, ...] = ("tokens", "attention_mask", "agent_mask")
        return names if self.reference is not None else (*names, "ref_log_prob")

    def _ratios(self, tensordict: TensorDictBase, batch: TransitionBatch) -> RowRatios:
        """The log-ratios of the rows, with gradients."""
        given = None
        rules = unwritable(self.scorer, batch)
        if self.reference is None:
            entry = tensordict.get(self.tensor_keys.ref_log_prob).detach().reshape(batch.decision.shape)
            given = shift_left(entry).flatten()[batch.place]
            source = self._sources["ref_log_prob"]
            rules.append((~given.isfinite(), f"ref_log_prob that is not finite at position {{position}}: {source}"))
        self._refuse(batch, rules)
        log_prob = self._log_prob(self.scorer, batch, self._policy_states(self._policy_trunk(batch.rows.copy())))
        ref_log_prob = self._ref_log_prob(batch) if given is None else given
        ratio = torch.where(batch.counts, log_prob - ref_log_prob, 0.0)
        number = batch.at_decisions(batch.counts.to(ratio.dtype)).sum(-1)
        return RowRatios(batch.at_decisions(ratio).sum(-1), number, number > 0)

    def _log_prob(self, scorer: RowScorer, batch: DecisionBatch, states: States) -> Tensor:
        """Log-probability of each token that was written, ``[N]``."""

        def score(place: Tensor, action: Tensor) -> tuple[Tensor, ...]:
            return (scorer.log_softmax(states, place).gather(-1, action[:, None]).squeeze(-1),)

        return scorer.with_certain_ends(batch, over_decisions(self, batch, score)[0])

    @torch.no_grad()
    def _ref_log_prob(self, batch: DecisionBatch) -> Tensor:
        """The same under the reference model."""
        reference: Any = self.reference
        reference.check_unchanged()
        scorer = self._scorer(reference.actor)
        with reference.eval_mode():
            return self._log_prob(scorer, batch, scorer.states(batch))

    def _reduce_rows(self, values: Tensor, batch: TransitionBatch, counts: Tensor) -> Tensor:
        """Reduce one value a row, ``[B]``; where nothing is reduced, it stands at the row's last decision."""
        place = batch.place[batch.last]
        row = place // batch.decision.shape[1]
        return self._reduce(values[row], batch, place, counts[row])


class PairLoss(PreferenceLoss):
    """Base of the losses of pairs of rows, a better and a worse one. Abstract: a loss fills in ``_loss``."""

    def __init__(
        self, actor_network: Policy, reference: FrozenActor | None = None, *, per_token: bool = False, **options: Any
    ) -> None:
        super().__init__(actor_network, reference, **options)
        self.per_token = per_token

    @abstractmethod
    def _loss(self, h: Tensor) -> Tensor:
        """The loss of each pair by the difference of its log-ratios, both ``[M]``."""

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of a batch of pairs of rows."""
        shape = self._needed(tensordict, "tokens").shape
        if len(shape) < 2 or shape[-2] != 2:
            pairs = f"{type(self).__name__} reads pairs of rows, tokens [*B, 2, T], the chosen ones first"
            raise ValueError(f"{pairs}, got {list(shape)}: make them with preference_pairs(rows).")
        batch = self._find(tensordict)
        ratios = self._ratios(tensordict, batch)
        l = ratios.sum / ratios.number.clamp_min(1) if self.per_token else ratios.sum  # noqa: E741
        (l_w, l_l), both = l.reshape(-1, 2).unbind(-1), ratios.counts.reshape(-1, 2).all(-1)
        h = l_w - l_l
        loss, counts = (pad(each[:, None], (0, 1)).flatten() for each in (self._loss(h), both))  # of the chosen rows
        r_w, r_l = self.beta * l_w, self.beta * l_l
        metrics = {"chosen_reward": r_w, "rejected_reward": r_l, "margin": r_w - r_l, "accuracy": (h > 0).to(h.dtype)}
        losses = {"loss_actor": self._reduce_rows(loss, batch, counts)}
        return self._output(batch, losses, {key: masked_mean(each, both) for key, each in metrics.items()})


class DPOLoss(PairLoss):
    r"""Direct preference optimisation (DPO) of pairs of rows of tokens.

    With ``l_w`` and ``l_l`` the log-ratios of the chosen and the rejected row to the reference, and ``sigma`` the
    logistic function (arXiv 2305.18290, eq. 7; with ``label_smoothing`` its conservative form, in which a pair is the
    wrong way round with the probability ``eps``)::

        l = sum_j log pi(a_j | s_j) - log ref(a_j | s_j)              over the agent's tokens of a row
        h = l_w - l_l
        loss_actor = mean_pairs -(1 - eps) log sigma(beta h) - eps log sigma(-beta h)

    A dialogue of many turns is one row, and one sum: the environment's tokens have no part in it. What both rows of a
    pair have in common, such as the agent's turns in a shared prompt, cancels. Rows that are equally likely under
    policy and reference, as at the start of training, have the loss ``log 2``.

    Where the environment's replies are random, a row may be the better one by luck; pairs of episodes that begin
    alike (``group_size=`` of environments) leave out the luck of the start.

    Two passes of a trunk a batch, that of the reference without gradients; one with rows that bring ``ref_log_prob``.
    Ratios are those of the distributions that act: given an :class:`~torchrl_lang.modules.UtteranceActor`, with its
    temperature, forbidden tokens and certain last slot; filters (``top_k``, ``top_p``, ``min_p``) are refused.

    Args:
        actor_network: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over one, without guidance.
        reference: :func:`~torchrl_lang.transforms.frozen_copy` or :func:`~torchrl_lang.transforms.adapters_off` of the
            actor before it is trained; None where the rows bring ``ref_log_prob``, which
            :class:`~torchrl_lang.transforms.ReferenceModelLogProbTransform` of a
            :class:`~torchrl_lang.transforms.RowReference` writes.

    Keyword Args:
        beta: how much reward one nat of log-ratio is worth, above zero: the larger, the nearer to the reference.
        label_smoothing: ``eps``, in ``[0, 0.5)``.
        per_token: each ``l`` is the mean over the row's tokens, not the sum.
        embed_weights: keep the weights of the reference in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another reference raises.
        logits_chunk: decisions whose logits exist at a time; the backward pass computes them again. ``"auto"``: pieces
            of a few dozen megabytes where all would be more. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, 2, T]``: that of a pair at the
            chosen row's last decision.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``agent_mask`` (bool) and without a reference
    ``ref_log_prob`` (float, at the agent's tokens), each ``[*B, 2, T]``, the chosen row of a pair before the rejected
    one, as :func:`~torchrl_lang.data.preference_pairs` makes them. It is left as it was. A pair of which a row has no
    agent's token that counts is left out. The output holds ``loss_actor`` and, detached, the means over pairs
    ``chosen_reward`` (``beta l_w``), ``rejected_reward`` (``beta l_l``), ``margin`` (their difference) and ``accuracy``
    (the share of pairs with ``h > 0``).

    Raises:
        KeyError: an entry is missing; the message names its source.
        ValueError: an option is out of range, shapes differ, rows are no pairs, or an action that counts cannot be
            written by the policy.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import preference_pairs
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import DPOLoss
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.transforms import frozen_copy
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> answers = [Episode([Turn("ab"), Turn(text, float(text == "c"))], True) for text in "abc"]
        >>> rows = to_rows(answers, tokenizer, 9)
        >>> pairs = preference_pairs(rows)
        >>> pairs["tokens"].shape
        torch.Size([1, 2, 9])
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=9)
        >>> actor = language_actor(lm)
        >>> loss = DPOLoss(actor, frozen_copy(actor))
        >>> float(loss(pairs)["loss_actor"].detach())  # the policy is still the reference
        0.693147...
    """

    out_keys = _OF_PAIRS

    def __init__(
        self,
        actor_network: Policy,
        reference: FrozenActor | None = None,
        *,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, reference, **options)
        self._set_options(label_smoothing=label_smoothing)

    def _loss(self, h: Tensor) -> Tensor:
        eps = self.label_smoothing
        loss = -(1 - eps) * logsigmoid(self.beta * h)
        return loss - eps * logsigmoid(-self.beta * h) if eps else loss


class IPOLoss(PairLoss):
    r"""Identity preference optimisation (IPO) of pairs of rows of tokens.

    The difference of the log-ratios is drawn to a finite margin instead of being widened without end (arXiv 2310.12036,
    eq. 17; its ``tau`` is ``beta``)::

        l = sum_j log pi(a_j | s_j) - log ref(a_j | s_j)              over the agent's tokens of a row
        h = l_w - l_l
        loss_actor = mean_pairs (h - 1 / (2 beta))^2

    TRL has the mean over the tokens of each row in place of the sum, so that ``beta`` means the same whatever the
    length, and reports that the paper's results were found so: ``per_token=True``. The paper writes the sum.

    Args:
        actor_network, reference: as in :class:`DPOLoss`.

    Keyword Args:
        beta: the margin is ``1 / (2 beta)``: the larger, the nearer to the reference.
        per_token: each ``l`` is the mean over the row's tokens, not the sum.
        embed_weights, logits_chunk, reduction: as in :class:`DPOLoss`.

    Input, output and errors are those of :class:`DPOLoss`.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import IPOLoss
        >>> from torchrl_lang.transforms import frozen_copy
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> mask = torch.ones(1, 2, 3, dtype=torch.bool)
        >>> pairs = TensorDict(
        ...     tokens=torch.tensor([[[4, 1, 2], [4, 3, 2]]]),
        ...     attention_mask=mask,
        ...     agent_mask=mask & (torch.arange(3) > 0),
        ...     batch_size=[1, 2],
        ... )
        >>> float(IPOLoss(actor, frozen_copy(actor), beta=0.5)(pairs)["loss_actor"].detach())
        1.0
    """

    out_keys = _OF_PAIRS

    def _loss(self, h: Tensor) -> Tensor:
        return (h - 1 / (2 * self.beta)).square()


class KTOLoss(PreferenceLoss):
    r"""Kahneman-Tversky optimisation (KTO) of rows of tokens, each of which is desirable or not.

    Rows need no partner. With ``l`` the log-ratio of a row, ``sigma`` the logistic function, and ``lambda`` the
    ``desirable_weight`` or the ``undesirable_weight`` (arXiv 2402.01306, eq. 8)::

        l    = sum_j log pi(a_j | s_j) - log ref(a_j | s_j)           over the agent's tokens of a row
        v    = sigma(beta (l - z_0)) of a desirable row, sigma(beta (z_0 - l)) of another one
        loss_actor = mean_rows lambda (1 - v)

    ``z_0`` stands for the divergence of the policy from the reference, without gradient. As in the paper it is
    estimated from mismatched rows, the beginning of each row (up to the agent's first token) with all that follows the
    beginning of the next one in the batch, as far as the model's positions go::

        z_0 = max(0, mean_i l(beginning_i, rest_(i+1)))

    This takes two more passes without gradients. Where all rows begin alike, such as games that the environment opens
    with the same words, a mismatched row is simply the next row, and ``baseline="rows"``, the mean of the rows' own
    ``l``, is the same without them. A batch of one row has only itself to compare with.

    Passes and ratios are otherwise those of :class:`DPOLoss`.

    Args:
        actor_network, reference: as in :class:`DPOLoss`.

    Keyword Args:
        beta: how soon a gain is enough: the larger, the nearer to the reference.
        desirable_weight, undesirable_weight: the paper's lambdas. It advises a ratio of desirable over undesirable,
            each weight times the number of its rows, between 1 and 4/3.
        baseline: ``z_0``: ``"mismatched"``, which needs a reference model, ``"rows"``, or a number.
        embed_weights, logits_chunk: as in :class:`DPOLoss`.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``: that of a row at its last
            decision.

    The input holds ``tokens`` (int64 or int32), ``attention_mask`` and ``agent_mask`` (bool) and without a reference
    ``ref_log_prob`` (float, at the agent's tokens), each ``[*B, T]``, and ``desirable``, bool ``[*B, 1]`` or ``[*B]``.
    It is left as it was. Rows without an agent's token that counts are left out. The output holds ``loss_actor`` and,
    detached, ``desirable_reward`` and ``undesirable_reward`` (means of ``beta l`` over the rows of each kind, 0 where
    there is none), ``margin`` (their difference) and ``baseline`` (``z_0``).

    Raises:
        KeyError: an entry is missing; the message names its source.
        TypeError: ``desirable`` is not bool.
        ValueError: an option is out of range, shapes differ, or an action that counts cannot be written by the policy.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import KTOLoss
        >>> from torchrl_lang.transforms import frozen_copy
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> mask = torch.ones(2, 3, dtype=torch.bool)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2], [4, 3, 2]]),
        ...     attention_mask=mask,
        ...     agent_mask=mask & (torch.arange(3) > 0),
        ...     desirable=torch.tensor([[True], [False]]),
        ...     batch_size=[2],
        ... )
        >>> out = KTOLoss(actor, frozen_copy(actor))(rows)
        >>> float(out["loss_actor"].detach()), float(out["baseline"])  # the policy is still the reference
        (0.5, 0.0)
    """

    out_keys = ["loss_actor", "desirable_reward", "undesirable_reward", "margin", "baseline"]
    _more_entries = ("desirable",)

    def __init__(
        self,
        actor_network: Policy,
        reference: FrozenActor | None = None,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        baseline: Literal["mismatched", "rows"] | float = "mismatched",
        **options: Any,
    ) -> None:
        super().__init__(actor_network, reference, **options)
        self._set_options(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        check_options(baseline=(baseline, ("mismatched", "rows") if isinstance(baseline, str) else "(-inf, inf)"))
        if baseline == "mismatched" and reference is None:
            raise ValueError("Mismatched rows need a reference model: give one, or baseline='rows' or a number.")
        self.baseline = baseline

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of a batch of rows."""
        batch = self._find(tensordict)
        desirable = self._desirable(tensordict, batch)
        l, _, counts = self._ratios(tensordict, batch)  # noqa: E741
        z_0 = self._baseline(batch, l.detach(), counts)
        v = sigmoid(self.beta * torch.where(desirable, l - z_0, z_0 - l))
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = {"loss_actor": self._reduce_rows(weight * (1 - v), batch, counts)}
        r_d, r_u = (masked_mean(self.beta * l, counts & kind) for kind in (desirable, ~desirable))
        metrics = {"desirable_reward": r_d, "undesirable_reward": r_u, "margin": r_d - r_u, "baseline": z_0}
        return self._output(batch, losses, metrics)

    def _desirable(self, tensordict: TensorDictBase, batch: TransitionBatch) -> Tensor:
        """Bool ``[B]``: which rows are."""
        found = self._needed(tensordict, "desirable")
        if found.dtype != torch.bool:
            raise TypeError(f"desirable must be bool, got {found.dtype}: compare scores with a number.")
        if found.shape not in (batch.shape[:-1], (*batch.shape[:-1], 1)):
            raise ValueError(f"desirable must have shape {[*batch.shape[:-1], 1]}, got {list(found.shape)}.")
        return found.reshape(-1)

    @torch.no_grad()
    def _baseline(self, batch: TransitionBatch, l: Tensor, counts: Tensor) -> Tensor:  # noqa: E741
        """``z_0``, ``[]``, by the log-ratios ``[B]`` of the rows that count."""
        if not isinstance(self.baseline, str):
            return l.new_tensor(self.baseline)
        rows = counts.nonzero().squeeze(-1)
        if self.baseline == "rows" or not len(counts):  # models may fail on empty batches
            return masked_mean(l, counts).clamp_min(0)
        found = bool(len(rows))
        rows = rows if found else rows.new_zeros(1)  # processes that share a model all make the pass
        trunk, features = self.scorer.trunk, batch.features if self._reads_features else None
        limit = None if trunk is None else trunk.room(0 if features is None else features.places)
        other = mismatched(batch, rows, rows.roll(-1), limit=limit)
        log_prob = self._log_prob(self.scorer, other, self.scorer.states(other))
        ratio = other.at_decisions(log_prob - self._ref_log_prob(other)).sum(-1)
        return masked_mean(ratio, torch.full_like(ratio, found, dtype=torch.bool)).clamp_min(0)


def mismatched(batch: TransitionBatch, first: Tensor, second: Tensor, *, limit: int | None = None) -> DecisionBatch:
    """Rows of the beginning of one row, up to the agent's first token, and what follows that of another one.

    Args:
        batch: rows ``[B, T]``.
        first: int64 ``[M]``, numbers of the rows with the beginnings.
        second: int64 ``[M]``, numbers of those with the rests, whose decisions are the ones that count there.
        limit: tokens that a row may have; longer ones are cut.

    Returns:
        Rows ``[M, W]``, with the features of the first ones.
    """
    begin, length = batch.agent_mask.long().argmax(-1), batch.attention_mask.sum(-1)
    own, rest = begin[first][:, None], begin[second][:, None]
    total = own + length[second][:, None] - rest
    width, last = int(total.max()), batch.tokens.shape[-1] - 1
    width = width if limit is None else min(width, limit)
    position = torch.arange(width, device=batch.tokens.device).expand(len(first), -1)
    real, source = position < total, (position - own + rest).clamp(0, last)  # where the rest comes from
    opening = batch.tokens[first].gather(-1, position.clamp(max=last))
    tokens = torch.where(position < own, opening, batch.tokens[second].gather(-1, source))
    agent = (position >= own) & real & batch.agent_mask[second].gather(-1, source)
    counted = batch.at_decisions(batch.counts.to(tokens.dtype))[second].gather(-1, source).bool()
    decision = counted & shift_left(agent)
    place = decision.flatten().nonzero().squeeze(-1)
    rows = batch.rows.select(schema.FEATURES, schema.FEATURES_MASK, strict=False)[first]
    rows = rows.set(schema.TOKENS, tokens).set(schema.ATTENTION_MASK, real)
    action = shift_left(tokens).flatten()[place]
    return DecisionBatch(tokens, real, place, action, agent, tokens.shape, rows)
