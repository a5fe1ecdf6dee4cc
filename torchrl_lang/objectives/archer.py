"""ArCHer (arXiv 2402.19446): the critic of utterances, trained off policy; the policy learns with PPOLoss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_lang import schema
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.functional.returns import td_target
from torchrl_lang.functional.value_terms import explained_variance, masked_mean
from torchrl_lang.modules.head_values import STATE_VALUE, UTTERANCE_VALUE
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.objectives.base import Policy, over_rows
from torchrl_lang.objectives.networks import as_head, gather_inputs, least_target, target_values, values_at
from torchrl_lang.objectives.utterance_ilql import UtterancePlaces
from torchrl_lang.objectives.values import Passes, QValueLoss


class ArCHerLoss(QValueLoss):
    r"""The critic of ArCHer: values of utterances under the current policy, from games of earlier ones.

    An utterance ``u_i`` of a row has the state ``s_i``, the position before its first token, and the sum ``R_i`` of its
    tokens' rewards; ``s_{i+1}`` is the state of the next utterance (arXiv 2402.19446; ``d`` is 1 where the task ended,
    ``Qt`` the minimum of the target heads, ``Vt`` the target of ``V``; ``u`` is drawn from ``pi(. | s)``;
    :meth:`estimate` writes ``A``)::

        loss_qvalue = qvalue_weight * mean_i sum_k (R_i + gamma (1 - d_{i+1}) Vt(s_{i+1}) - Q_k(s_i, u_i))^2
        loss_value  = value_weight  * mean_s (Qt(s, u) - V(s))^2
        A_i         = min_k Q_k(s_i, u_i) - V(s_i)

    ``Q`` learns from any games, however old: no term depends on who wrote ``u_i``. What the current policy ``pi`` does
    enters by ``V`` alone, from utterances that it draws in the states of those games
    (:func:`~torchrl_lang.modules.draw_utterances`). Such rows have a True ``drawn`` (bool ``[*B, 1]``): they train
    ``V``, the others in the batch train ``Q``. In a batch without that entry all rows train both, which evaluates the
    policy that wrote them.

    The policy's term is the policy gradient over the tokens of utterances ``u ~ pi(. | s)`` drawn in states of the same
    games, ``-mean_s A log pi(u | s)``. :class:`~torchrl_lang.objectives.PPOLoss` without a critic computes it:
    on fresh utterances its ratio is 1, and with ``aggregation=1`` its mean is that over utterances, as in the paper.

    The paper's code has two critics with a V each, and takes the minimum over them in the advantage only. Here one V is
    the mean of the minimum over the heads, so that ``A`` has mean zero under the policy.

    ``Q`` reads the hidden state at the utterance's last decision, in which its end is written, and ``V`` that at
    ``s_i``, as in :class:`~torchrl_lang.objectives.UtteranceILQLLoss`, whose rules hold for utterances that are cut off
    and for masks. The paper's critic is a model of its own: give its trunk as ``value_trunk``, with a ``target_trunk``.

    Target parameters are for :class:`~torchrl.objectives.SoftUpdate` or :class:`~torchrl.objectives.HardUpdate`. An
    optimizer of the critic alone has the parameters of ``qvalue_network_params``, ``value_network_params`` and, with a
    trunk of its own, ``value_trunk``.

    Args:
        actor_network: the policy, of which only the trunk is read, if there is no ``value_trunk``.
        qvalue_network: any module ``hidden [U, H] -> utterance_value [U, n_q]``, all heads in one; ``[U]`` is one head.
        value_network: likewise ``hidden [S, H] -> state_value [S, 1]`` or ``[S]``.

    Keyword Args:
        value_trunk: a trunk of its own for both; by default they read the actor's.
        target_trunk: target values read a target copy of the trunk, too.
        gamma: discount, one an utterance.
        value_weight, qvalue_weight: weights of the terms. One of weight zero is not computed.
        detach_value: no gradient from the values into the trunk.
        end_of_action: id of the token that ends an utterance; default that of an UtteranceActor. Without it an
            utterance ends where the environment writes.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for values at positions, ``[*B, T]``: those of an utterance
            stand at its last decision.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss` and, where it is there, ``drawn``. The output holds
    both losses and, detached, the means ``qvalue``, ``value`` and ``target_qvalue`` over utterances that train Q, or V,
    and ``explained_variance``, of Q's targets by Q.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, shapes differ, or steps of a rollout came instead of rows.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs.games import CorridorEnv
        >>> from torchrl_lang.modules import UtteranceActor, UtteranceQValueHead, ValueHead, causal_lm, language_actor
        >>> from torchrl_lang.modules import draw_utterances, qvalue_module, value_module, with_drawn
        >>> from torchrl_lang.objectives import ArCHerLoss, PPOLoss
        >>> env = CorridorEnv(length=3, batch_size=[4], seed=0)
        >>> control, vocabulary = env.tokenizer.control, env.tokenizer.vocab_size
        >>> lm = causal_lm(vocab_size=vocabulary, layers=1, width=16, heads=2, max_length=48)
        >>> policy = UtteranceActor(language_actor(lm), control, env.action_length, seed=0)
        >>> critic = ArCHerLoss(policy, qvalue_module(UtteranceQValueHead(16)), value_module(ValueHead(16)))
        >>> games = rows_from_rollout(env.rollout(8, policy, break_when_any_done=False), unfinished="truncate")
        >>> out = critic(with_drawn(games, draw_utterances(policy, games)))
        >>> (out["loss_qvalue"] + out["loss_value"]).backward()
        >>> drawn = critic.estimate(draw_utterances(policy, games))
        >>> PPOLoss(policy, aggregation=1)(drawn)["loss_objective"].backward()
    """

    @dataclass
    class _AcceptedKeys(QValueLoss._AcceptedKeys):
        """The keys of :class:`QValueLoss`, of drawn rows, and of what :meth:`estimate` writes."""

        drawn: NestedKey = schema.DRAWN
        advantage: NestedKey = "advantage"

    default_keys = _AcceptedKeys
    out_keys = ["loss_value", "loss_qvalue", "value", "qvalue", "target_qvalue", "explained_variance"]
    _kinds = {"qvalue_network": UTTERANCE_VALUE, "value_network": STATE_VALUE}

    def __init__(
        self,
        actor_network: Policy,
        qvalue_network: nn.Module,
        value_network: nn.Module,
        *,
        value_trunk: TensorDictModule | None = None,
        target_trunk: bool = False,
        gamma: float = 0.99,
        value_weight: float = 1.0,
        qvalue_weight: float = 1.0,
        detach_value: bool = False,
        end_of_action: int | None = None,
        reduction: str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            qvalue_network,
            value_trunk=value_trunk,
            target_trunk=target_trunk,
            gamma=gamma,
            qvalue_weight=qvalue_weight,
            end_of_action=end_of_action,
            reduction=reduction,
        )
        value_network = as_head(self, "value_network", value_network, value_trunk)
        self.convert_to_functional(value_network, "value_network", create_target_params=True)
        self._set_options(value_weight=value_weight, detach_value=detach_value)

    @property
    def optional_in_keys(self) -> list[NestedKey]:
        """Those of all losses, and ``drawn``."""
        return [*super().optional_in_keys, self.tensor_keys.drawn]

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        rows, found = Passes(self, batch, reads_policy=False), UtterancePlaces.of(self, batch)
        spans, place = found.spans, found.place
        counted, drawn = batch.counts_at(place), tensordict.get(self.tensor_keys.drawn, None)
        if drawn is not None:  # of rows; below of utterances
            schema.check_entry(schema.DRAWN, drawn, batch.shape)
            drawn = drawn.reshape(-1)[spans.row[spans.state]]
        losses, metrics = {}, {}
        if self.qvalue_weight:
            played = counted if drawn is None else counted & ~drawn
            q = values_at(self, "qvalue_network", rows.values, place, detach=self.detach_value)
            states = gather_inputs(self.value_network.in_keys, rows.target, found.state_place)
            next_value = target_values(self, "value_network", states).squeeze(-1)[spans.state + 1]
            y = td_target(spans.total(batch.reward), next_value, found.terminated, self.gamma)
            error = (y[:, None] - q).square().sum(-1)
            losses["loss_qvalue"] = self._qvalue_loss(tensordict, batch, error, place, played)
            metrics["qvalue"] = masked_mean(q.mean(-1), played)
            metrics["explained_variance"] = explained_variance(q.detach().mean(-1), y, played)
        if self.value_weight:
            current = counted if drawn is None else counted & drawn
            at = found.state_place[spans.state]
            v = values_at(self, "value_network", rows.values, at, detach=self.detach_value).squeeze(-1)
            target = least_target(self, gather_inputs(self.qvalue_network.in_keys, rows.target, place))
            losses["loss_value"] = self.value_weight * self._reduce((target - v).square(), batch, place, current)
            metrics |= {"value": masked_mean(v, current), "target_qvalue": masked_mean(target, current)}
        return self._output(batch, losses, metrics)

    @torch.no_grad()
    def estimate(self, rows: TensorDictBase) -> TensorDictBase:
        """Write ``advantage`` float ``[*B, T]`` into ``rows`` and return them: ``A(s, u)`` at each token of ``u``.

        It is zero at other tokens, and at those of an utterance that the row cuts off. The trunk runs once, in
        evaluation mode.

        Raises:
            KeyError, ValueError: as in a call of the loss.
        """
        tokens = rows.get(self.tensor_keys.tokens, None)
        if tokens is not None and not tokens.numel():
            return rows.set(self.tensor_keys.advantage, torch.zeros(tokens.shape, device=tokens.device))
        batch = self._find(rows)
        found = UtterancePlaces.of(self, batch)
        with eval_mode(self):
            states = self._value_trunk(batch.rows.copy())
            q = values_at(self, "qvalue_network", states, found.place).amin(-1)
            v = values_at(self, "value_network", states, found.state_place[found.spans.state]).squeeze(-1)
        each = torch.cat([q - v, q.new_zeros(1)])[found.spans.of_decision]
        dense = shift_right(batch.at_decisions(each))
        return rows.set(self.tensor_keys.advantage, dense.reshape(batch.shape))
