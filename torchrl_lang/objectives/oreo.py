"""OREO (arXiv 2412.16145): a policy and its soft values by path consistency, for rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang.functional.returns import PathLevel, action_log_ratio, soft_returns
from torchrl_lang.modules.controllers import KLController
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.objectives.base import Policy, RowLoss, TransitionBatch, over_rows
from torchrl_lang.objectives.networks import as_head, trained_params, values_at
from torchrl_lang.objectives.policy import (
    environment_loss,
    kl_controller,
    only_scaled,
    reference_of,
    score_decisions,
    unwritable,
)


class OREOLoss(RowLoss):
    r"""Offline reasoning optimisation (OREO) over rows of tokens.

    The policy of highest return less ``beta`` times its divergence from a reference is consistent with its value on
    every path: ``V(s_t) = sum_{i >= t} (r_i - beta l_i)`` with ``l_i = log pi(a_i | s_i) - log pi_ref(a_i | s_i)``
    (path consistency, arXiv 1702.08892). Both are learned from how far paths of the data are from that (arXiv
    2412.16145, eq. 8 and 9; ``sg`` stops gradients)::

        loss_value = value_weight * mean_t (V(s_t) - sg(sum_{i >= t} (r_i - beta l_i)))^2
        loss_actor = actor_weight * mean_t (sg(V(s_t)) - R_t + beta l_t + sg(beta sum_{i > t} l_i))^2
        loss_kl    = kl_weight    * mean_t KL(pi(. | s_t) || pi_ref(. | s_t))

    with ``R_t`` the rewards to go, undiscounted, and ``mean_t`` over all decisions (of ``loss_actor``: actions) of the
    batch. The paper's code takes the mean of each trajectory first and then that of the means, so that decisions of
    short trajectories count more there. On a single decision the optimum is ``pi = pi_ref exp(r / beta) / Z`` and
    ``V = beta log Z``. Every output whose name begins with ``loss_`` is already weighted: a training step minimises
    their sum. A term of weight zero is not computed and comes out as zero.

    Consistency on single paths is that of an environment whose replies follow from what was written. Where they are
    random, a path's luck counts as the policy's doing: the residuals do not vanish, and the policy prefers what was
    lucky.

    Consistency does not determine tokens that the data do not take at a state: a policy may keep any probability for
    them, and its value is the higher. ``kl_weight`` holds them at the reference.

    What an action is, ``level``: a token; an utterance, of whose tokens the log-ratios are added (the paper's
    step-level variant); or all that the agent writes in a row (its response-level variant), with one residual at the
    first state. The value learns at every decision at each level. The paper's ``kl_weight`` is 0.01, 0.1 and 0.3 at the
    three levels.

    The paper's rows have ended. Here one that has not is bootstrapped by ``sg(V)`` of its last position. All decisions
    of a row are part of its path, also those that a mask leaves out: these have no residual and get no gradient. An
    action is left out where its first token is.

    Two passes of a trunk a batch, that of the reference without gradients; one more with a ``value_trunk``, which the
    paper has. Ratios are those of the distributions that act: given an :class:`~torchrl_lang.modules.UtteranceActor`,
    with its temperature, forbidden tokens and certain last slot; filters (``top_k``, ``top_p``, ``min_p``) are refused.

    Args:
        actor_network: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over one, without guidance.
        value_network: any module ``hidden [N, H] -> state_value [N, 1]`` or ``[N]``.
        reference: ``pi_ref``, :func:`~torchrl_lang.transforms.frozen_copy` or
            :func:`~torchrl_lang.transforms.adapters_off` of the actor before it is trained, usually by behaviour
            cloning.

    Keyword Args:
        value_trunk: a trunk of its own for the values; by default they read the actor's.
        beta: how much reward is worth one nat of divergence, above zero.
        value_weight, actor_weight: weights of the terms.
        kl_weight: weight of the divergence, the paper's alpha: a number or a
            :class:`~torchrl_lang.transforms.KLController`.
        embed_weights: keep the weights of the reference in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another reference raises.
        level: ``"token"``, ``"utterance"`` or ``"row"``.
        detach_value: no gradient from the values into the trunk.
        transition_weight: weight of ``loss_transition``, the cross-entropy of the environment's tokens.
        end_of_action: id of the token that ends an utterance, for ``level="utterance"``; default that of an
            UtteranceActor. Without it an utterance ends where the environment writes.
        actor_normalizer: ``"all"`` divides ``loss_transition`` by the real tokens, ``"action"`` by the decisions.
        logits_chunk: decisions whose logits exist at a time; the backward pass computes them again. ``"auto"``: pieces
            of a few dozen megabytes where all would be more. A number forces pieces, None the whole table.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`. The output holds the four losses and, detached, the
    means over decisions ``value``, ``log_ratio`` (``l``), ``residual`` (the absolute value of what ``loss_value``
    squares) and ``kl``.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option is out of range, shapes differ, steps of a rollout came instead of rows, or an action that
            counts cannot be written by the policy: a forbidden token, or an utterance longer than ``action_length``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import ValueHead, causal_lm, language_actor, value_module
        >>> from torchrl_lang.objectives import OREOLoss
        >>> from torchrl_lang.transforms import frozen_copy
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = OREOLoss(actor, value_module(ValueHead(16)), frozen_copy(actor), beta=0.5)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, 1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> out = loss(rows)
        >>> sum(value for key, value in out.items() if key.startswith("loss_")).backward()
        >>> float(out["log_ratio"]), float(out["kl"])  # the policy is still the reference
        (0.0, 0.0)
    """

    out_keys = ["loss_value", "loss_actor", "loss_kl", "loss_transition", "value", "log_ratio", "residual", "kl"]
    _targets = "its targets are the soft returns to go of rows, computed in each call of the loss"
    kl_controller: KLController | None

    def __init__(
        self,
        actor_network: Policy,
        value_network: nn.Module,
        reference: FrozenActor,
        *,
        value_trunk: TensorDictModuleBase | None = None,
        beta: float = 0.03,
        value_weight: float = 1.0,
        actor_weight: float = 1.0,
        kl_weight: float | KLController = 0.01,
        embed_weights: bool = False,
        level: PathLevel = "token",
        detach_value: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, **options)
        self.value_network = as_head(self, "value_network", value_network, value_trunk)
        self.value_trunk = value_trunk
        self.reference = reference_of(actor_network, reference, is_read=True)
        self.embed_weights = embed_weights
        only_scaled(self, actor_network, reference.actor)
        self._set_options(beta=beta, value_weight=value_weight, actor_weight=actor_weight, level=level)
        self._set_options(detach_value=detach_value)
        self.kl_controller = kl_controller(kl_weight)

    @property
    def value_network_params(self) -> TensorDictParams:
        """Parameters of the value head, without its trunk: a group of an optimizer."""
        return trained_params(self.value_network)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        self._refuse(batch, unwritable(self.scorer, batch))
        rows = self._policy_trunk(batch.rows.copy())
        scores = score_decisions(self, batch, rows)
        value_rows = rows if self.value_trunk is None else self.value_trunk(batch.rows.copy())
        v = values_at(self, "value_network", value_rows, batch.state_place, detach=self.detach_value).squeeze(-1)
        value, next_value = v[batch.state], v[batch.state + 1].detach()
        # Of decisions that do not count l has no gradient, and is 0 if it cannot be made.
        ratio = scores.log_prob - scores.ref_log_prob  # l
        ratio = torch.where(batch.counts, ratio, ratio.detach().nan_to_num(0.0, 0.0, 0.0))
        error = value - self._soft_returns(batch, ratio.detach(), next_value)
        losses = {"loss_transition": environment_loss(self, batch, rows)}
        if self.value_weight:
            losses["loss_value"] = self.value_weight * self._reduce_decisions(error.square(), batch)
        if self.actor_weight:
            losses["loss_actor"] = self.actor_weight * self._path_loss(batch, error.detach(), ratio)
        if self.kl_controller is not None:
            losses["loss_kl"] = self.kl_controller(scores.kl.dtype) * self._reduce_decisions(scores.kl, batch)
        metrics = {"value": value, "log_ratio": ratio, "residual": error.abs(), "kl": scores.kl}
        return self._output(batch, losses, metrics)

    def _soft_returns(self, batch: TransitionBatch, ratio: Tensor, next_value: Tensor) -> Tensor:
        """Targets of V at the decisions, ``[N]``: ``sum_{i >= t} (r_i - beta l_i)``."""
        reward, bootstrap = batch.next_reward.to(ratio.dtype), batch.bootstrap(next_value)
        returns = soft_returns(reward, batch.at_decisions(ratio), bootstrap, batch.decision, self.beta)
        return returns.flatten()[batch.place]

    def _path_loss(self, batch: TransitionBatch, error: Tensor, ratio: Tensor) -> Tensor:
        """The squared residual of each action, with a gradient through its own log-ratio alone."""
        ends = self._turn_ends(batch) if self.level == "utterance" else batch.decision
        own, begins = action_log_ratio(batch.at_decisions(ratio), batch.decision, ends, self.level)
        own, begins = own.flatten()[batch.place], begins.flatten()[batch.place]
        residual = error + self.beta * (own - own.detach())
        return self._reduce(residual.square(), batch, batch.place, batch.counts & begins)
