"""CHAI (arXiv 2204.08426): Q-learning over utterances that a frozen language model proposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang import schema
from torchrl_lang._checks import have_shapes
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.returns import td_target
from torchrl_lang.functional.value_terms import masked_mean, sampled_cql_term
from torchrl_lang.modules.head_values import UTTERANCE_VALUE
from torchrl_lang.objectives.base import TransitionBatch, over_rows
from torchrl_lang.objectives.networks import least_target, online_values
from torchrl_lang.objectives.values import QValueLoss


class CHAILoss(QValueLoss):
    r"""Q-learning with a maximum over utterances that a frozen language model proposes (CHAI, arXiv 2204.08426).

    Only Q heads train, on features ``f(s, u)`` of a state and an utterance: the mean of the language model's hidden
    states from the row's first token to the utterance's last decision, in which its end is written
    (:func:`~torchrl_lang.modules.chai.utterance_features`). For each utterance ``u_i`` of a row with
    state ``s_i`` and the sum ``R_i`` of its tokens' rewards, and ``C`` candidates ``c`` of each state, sampled from the
    language model ``pi0`` (``d`` is 1 where the task ended, ``Qt`` is the minimum of the target heads)::

        y_i         = R_i + gamma (1 - d_{i+1}) max_c Qt(f(s_{i+1}, c))
        loss_qvalue = qvalue_weight * mean_i sum_k (y_i - Q_k(f(s_i, u_i)))^2
        loss_cql    = cql_weight * mean_i sum_k (log 1/C sum_c exp(Q_k(f(s_i, c))) / pi0(c | s_i) - Q_k(f(s_i, u_i)))

    The sum in ``loss_cql`` is importance-sampled: ``1/C sum_c exp(Q(c)) / pi0(c)`` is an unbiased estimate of the sum
    of ``exp(Q(u))`` over all utterances that ``pi0`` can write, as in conservative Q-learning (arXiv 2006.04779, eq.
    4). The paper also evaluates Q at random features, which have no density over utterances: they are left out.

    A mean over a long row changes little with its last utterance. It distinguishes more where the language model
    learned the environment's tokens too (``transition_weight`` of :class:`~torchrl_lang.objectives.BCLoss`). Where it
    does not distinguish enough, values drift along rows that are not terminated: a ``gamma`` below 1 bounds them.

    The features and candidates are columns of the rows, which a :class:`~torchrl_lang.modules.CandidateSampler` adds
    once: a training step runs no language model. It also found the utterances. A state without candidates, where the
    model has no positions for another utterance, gives no target: the utterance before is left out of ``loss_qvalue``
    unless the task ended, and that of the state out of ``loss_cql``; neither counts in that mean.

    An utterance counts where its last decision counts, by ``loss_mask_key`` or the train mask of its last token, with
    the rewards of all its tokens. Target parameters ``target_qvalue_network_params`` are for
    :class:`~torchrl.objectives.SoftUpdate` or :class:`~torchrl.objectives.HardUpdate`.

    Args:
        qvalue_network: features ``[N, H] -> utterance_value [N, n_q]``, all heads in one module with one input, as
            ``qvalue_module(UtteranceQValueHead(H))`` is, whatever that input is called.

    Keyword Args:
        gamma: discount, one an utterance.
        qvalue_weight, cql_weight: weights of the terms. One of weight zero is not computed.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for values at positions, ``[*B, T]``: those of an utterance
            stand at its last decision.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss` and the sampler's columns. The output holds the two
    losses and, detached, the means ``qvalue`` over utterances and ``candidate_value``, the greatest target value of the
    candidates, over the targets that bootstrap.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, or shapes differ.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.modules import CandidateSampler, UtteranceActor, UtteranceQValueHead, causal_lm
        >>> from torchrl_lang.modules import language_actor, qvalue_module
        >>> from torchrl_lang.objectives import CHAILoss
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=16)
        >>> policy = UtteranceActor(language_actor(lm), tokenizer.control, 4, seed=0)
        >>> rows = to_rows([Episode([Turn("a", 0.0), Turn("b"), Turn("cc", 1.0)], True)], tokenizer, 12)
        >>> loss = CHAILoss(qvalue_module(UtteranceQValueHead(8)))
        >>> out = loss(CandidateSampler(policy, 5)(rows))
        >>> (out["loss_qvalue"] + out["loss_cql"]).backward()
    """

    @dataclass
    class _AcceptedKeys(QValueLoss._AcceptedKeys):
        """The keys of :class:`QValueLoss` and the columns."""

        state_position: NestedKey = schema.STATE_POSITION
        state_mask: NestedKey = schema.STATE_MASK
        utterance_feature: NestedKey = schema.UTTERANCE_FEATURE
        candidate_mask: NestedKey = schema.CANDIDATE_MASK
        candidate_feature: NestedKey = schema.CANDIDATE_FEATURE
        candidate_log_prob: NestedKey = schema.CANDIDATE_LOG_PROB

    default_keys = _AcceptedKeys
    out_keys = ["loss_qvalue", "loss_cql", "qvalue", "candidate_value"]
    _kinds = {"qvalue_network": UTTERANCE_VALUE}
    _has_actor = False
    _more_entries = tuple(_AcceptedKeys.__annotations__)  # the columns
    _sources = dict.fromkeys(_more_entries, "add the columns to the dataset once, CandidateSampler(policy, 5)(rows)")

    def __init__(
        self,
        qvalue_network: nn.Module,
        *,
        gamma: float = 0.99,
        qvalue_weight: float = 1.0,
        cql_weight: float = 0.1,
        reduction: str | None = None,
    ) -> None:
        super().__init__(None, qvalue_network, gamma=gamma, qvalue_weight=qvalue_weight, reduction=reduction)
        self._set_options(cql_weight=cql_weight)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        columns = self._columns(tensordict, batch)
        found = _find_slots(batch, columns)
        counted = batch.counts_at(found.place)
        q = self._qvalues(columns["utterance_feature"][found.utterance])  # Q(f(s_i, u_i))
        losses, metrics = {}, {"qvalue": q.mean(-1)}
        if self.qvalue_weight:
            bootstraps = columns["candidate_mask"][found.utterance + 1] & ~found.terminated
            index = bootstraps.nonzero().squeeze(-1)
            features = columns["candidate_feature"][found.utterance[index] + 1]
            target = least_target(self, self._inputs(features.flatten(0, 1)))
            best = target.unflatten(0, features.shape[:2]).amax(-1)  # max_c Qt(f(s_{i+1}, c))
            next_value = best.new_zeros(len(q)).index_copy(0, index, best)
            y = td_target(found.reward, next_value, found.terminated, self.gamma)
            error = (y[:, None] - q).square().sum(-1)
            known = counted & (bootstraps | found.terminated)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, found.place, known)
            metrics["candidate_value"] = masked_mean(next_value, bootstraps & counted)
        if self.cql_weight:
            has = counted & columns["candidate_mask"][found.utterance]
            index = has.nonzero().squeeze(-1)
            slot = found.utterance[index]
            features, log_prob = columns["candidate_feature"][slot], columns["candidate_log_prob"][slot]
            proposed = self._qvalues(features.flatten(0, 1)).unflatten(0, log_prob.shape)
            each = sampled_cql_term(proposed, log_prob, q[index]).sum(-1)
            each = each.new_zeros(len(q)).index_copy(0, index, each)
            losses["loss_cql"] = self.cql_weight * self._reduce(each, batch, found.place, has)
        return self._output(batch, losses, metrics, counted)

    def _qvalues(self, features: Tensor) -> Tensor:
        """Online Q of features, ``[N, H] -> [N, n_q]``."""
        return online_values(self, "qvalue_network", self._inputs(features))

    def _inputs(self, features: Tensor) -> TensorDict:
        """Features ``[N, H]`` under the name by which the heads read them."""
        return TensorDict({self.qvalue_network.in_keys[0]: features}, batch_size=features.shape[:1])

    def _columns(self, tensordict: TensorDictBase, batch: TransitionBatch) -> dict[str, Tensor]:
        """The sampler's columns, flattened to one state an entry, ``[B * U, ...]``."""
        found = {name: self._needed(tensordict, name) for name in self._more_entries}
        shape = (*batch.shape[:-1], found["state_mask"].shape[-1])
        candidates, width = found["candidate_feature"].shape[-2:]
        trailing: dict[str, tuple[int, ...]] = {
            "utterance_feature": (width,),
            "candidate_feature": (candidates, width),
            "candidate_log_prob": (candidates,),
        }
        have_shapes(*((name, value, shape + trailing.get(name, ())) for name, value in found.items()))
        for name in ("state_mask", "candidate_mask"):
            schema.check_entry(name, found[name], found[name].shape)
        return {name: value.reshape(-1, *trailing.get(name, ())) for name, value in found.items()}


class _Slots(NamedTuple):
    """The ``U`` utterances of a batch."""

    utterance: Tensor
    """int64 ``[U]``: the place of each state among the columns; its successor is the next place."""
    place: Tensor
    """int64 ``[U]``: the place of each last decision in a batch flattened to ``[B * T]``."""
    reward: Tensor
    """float ``[U]``: the sum of the rewards of each utterance's tokens."""
    terminated: Tensor
    """bool ``[U]``: the task ended after the utterance."""


def _find_slots(batch: TransitionBatch, columns: Mapping[str, Tensor]) -> _Slots:
    """Find the utterances: states that another state of the same row follows, and in which the agent writes."""
    rows, width = batch.decision.shape
    has_state = columns["state_mask"].reshape(rows, -1)
    begin = columns["state_position"].reshape(rows, -1)
    utterance = has_state & shift_left(has_state) & batch.decision.gather(1, begin)
    # A decision belongs to the last state at or before it.
    first = torch.zeros_like(batch.tokens).scatter_add(1, begin, has_state.long())
    slot = (first.cumsum(-1) - 1).clamp_min(0)
    reward = torch.zeros_like(begin, dtype=batch.next_reward.dtype)
    reward = reward.scatter_add(1, slot, torch.where(batch.decision, batch.next_reward, 0))
    position = torch.arange(width, device=begin.device).expand(rows, width)
    end = torch.zeros_like(begin).scatter_reduce(1, slot, torch.where(batch.decision, position, 0), "amax")
    row, number = utterance.nonzero(as_tuple=True)
    is_last = ~shift_left(utterance)
    return _Slots(
        utterance=row * begin.shape[-1] + number,
        place=row * width + end[row, number],
        reward=reward[row, number],
        terminated=is_last[row, number] & batch.row_terminated[row],
    )
