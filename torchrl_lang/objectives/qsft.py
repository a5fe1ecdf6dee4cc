"""Q-SFT (arXiv 2411.05193): Q-learning as supervised fine-tuning, for rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor

from torchrl_lang.functional import returns_to_go
from torchrl_lang.functional.value_terms import likelihood_ratio_value, weighted_cross_entropy
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.objectives.base import Policy, RowLoss, TransitionBatch, over_rows
from torchrl_lang.objectives.networks import frozen_target, lent
from torchrl_lang.objectives.policy import Behavior, check_frozen, environment_loss, frozen_behavior, over_decisions
from torchrl_lang.objectives.values import NextStates, next_values, possible


class QSFTLoss(RowLoss):
    r"""Q-SFT over rows of tokens: a language model's own token probabilities become conservative action values.

    At each decision ``j`` with state ``s_j``, token ``a_j``, reward ``r_j`` and successor ``s_{j+1}`` (arXiv
    2411.05193, eq. 3; ``p`` is the model, ``pt`` its target copy, ``pi`` the frozen policy that made the data, ``d`` is
    1 where the task ended, ``V`` the number of tokens)::

        w_j         = r_j + gamma (1 - d_{j+1}) max_a pt(a | s_{j+1}) / pi(a | s_{j+1})
        loss_qvalue = -mean_j (w_j log p(a_j | s_j) + (1 - w_j) / (V - 1) sum_{a != a_j} log p(a | s_j))

    This is least where ``p(a | s)`` is ``pi(a | s) E[w]``, plus a part of the remaining mass: a value that is the
    smaller, the rarer the token in the data, which ``p / pi`` undoes in the backup. No head is added, so a pretrained
    model starts as it is. The policy is ``pi(a | s) exp(beta p(a | s))``, see
    ``LikelihoodGuidance``. With ``w = 1`` everywhere the loss is behaviour cloning.

    Values must be probabilities: the paper asks for discounted returns in [0, 1]. Give ``value_min`` and ``value_max``,
    the least and the greatest return to go, and values are probabilities in units of that interval: ``w = (y -
    value_min) / (value_max - value_min)`` of the backup ``y`` in the rewards' own units. A terminated row whose return
    to go lies outside raises ValueError. Values learned on the way are clipped to the interval.

    With ``rest``, ``1 - w_j`` goes to one token that the agent never writes, the paper's dummy action, which leaves no
    bias. Spread evenly it biases ``p(a | s) / pi(a | s)`` by up to ``1 / (V pi(a | s))``: nothing over tens of
    thousands of tokens, much over a dozen.

    The paper takes the maximum over all tokens, ``threshold=0``. The ratio of a token that hardly occurs is that of two
    small numbers, which finds the worst of them; with a ``threshold`` the maximum is over tokens with ``pi(a | s) /
    max_b pi(b | s) >= threshold``, as in :class:`~torchrl_lang.objectives.BCQLoss`. It is over what the policy can
    write: give an :class:`~torchrl_lang.modules.UtteranceActor` to leave out forbidden tokens, and in the last slot of
    an utterance all but its end.

    Three passes of a trunk a batch, two of them without gradients: the model, its target and the reference. The target
    is a copy of trunk and head, ``target_actor_network_params`` for :class:`~torchrl.objectives.SoftUpdate` or
    :class:`~torchrl.objectives.HardUpdate`; neither it nor the reference applies dropout. Probabilities are those of
    the language models, at temperature 1.

    Args:
        actor_network: the model that is trained: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`
            over one, without guidance. In the paper it begins as a copy of the reference.
        reference: ``pi``, :func:`~torchrl_lang.transforms.frozen_copy` of a finished behaviour cloning.

    Keyword Args:
        gamma: discount, one a decision; the environment's reply costs none.
        turn_gamma: discount of the step from the last token of an utterance to the next utterance; default ``gamma``.
        value_min, value_max: the returns to go whose probabilities are 0 and 1.
        threshold: in [0, 1].
        rest: id of a token that the agent never writes, such as padding.
        transition_weight: weight of ``loss_transition``, the cross-entropy of the environment's tokens.
        end_of_action: id of the token that ends an utterance, for ``turn_gamma``; default that of an UtteranceActor.
        actor_normalizer: ``"all"`` divides ``loss_transition`` by the real tokens, ``"action"`` by the decisions.
        logits_chunk: positions whose logits exist at a time. ``"auto"``: a few dozen megabytes. None: all at once.
        embed_weights: keep the weights of the reference in the ``state_dict``, which loading restores. By default it
            has only a fingerprint of them, and loading beside another reference raises.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value a position, ``[*B, T]``.

    The input is that of :class:`~torchrl_lang.objectives.ILQLLoss`: a row that is not terminated is bootstrapped from
    its last position. The output holds both losses and, detached, the means ``likelihood`` (``p(a_j | s_j)``) and
    ``td_target`` (``y``, in units of the rewards) over decisions.

    Raises:
        KeyError: an entry is missing; the message names it and :meth:`set_keys`.
        ValueError: an option or a return is out of range, the agent wrote the token ``rest``, shapes differ, or steps
            of a rollout came instead of rows.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.objectives import QSFTLoss
        >>> from torchrl_lang.transforms import frozen_copy
        >>> actor = language_actor(causal_lm("gpt2", vocab_size=12, layers=1, width=16, heads=2, max_length=8))
        >>> loss = QSFTLoss(actor, frozen_copy(actor), value_min=-2.0, value_max=0.0, rest=0)
        >>> target = SoftUpdate(loss, tau=0.005)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[4, 1, 2, 9]]),
        ...     attention_mask=torch.tensor([[True, True, True, True]]),
        ...     agent_mask=torch.tensor([[False, True, True, False]]),
        ...     token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0]]),
        ...     terminated=torch.tensor([[True]]),
        ...     batch_size=[1],
        ... )
        >>> loss(rows)["loss_qvalue"].backward()
        >>> target.step()
    """

    out_keys = ["loss_qvalue", "loss_transition", "likelihood", "td_target"]
    _targets = "its targets are backups over the vocabulary, computed in each call of the loss"
    reference: FrozenActor
    target_actor_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: Policy,
        reference: FrozenActor,
        *,
        gamma: float = 0.99,
        turn_gamma: float | None = None,
        value_min: float = 0.0,
        value_max: float = 1.0,
        threshold: float = 0.0,
        rest: int | None = None,
        embed_weights: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(actor_network, **options)
        check_frozen("QSFTLoss", "reference", reference, actor_network)
        self.reference, self.embed_weights = reference, embed_weights
        self._set_options(gamma=gamma, turn_gamma=turn_gamma, threshold=threshold, rest=rest)
        self._set_options(value_min=value_min, value_max=value_max)
        if value_min >= value_max:
            raise ValueError(f"value_min must lie below value_max, got {value_min} and {value_max}.")
        self.target_actor_network_params = frozen_target(self.actor_network_params)
        self._has_update_associated["actor_network"] = False

    @property
    def actor_network_params(self) -> TensorDictParams:
        """Parameters of the model, the source of ``target_actor_network_params``: by all names that weights have."""
        return TensorDict.from_module(self.language_actor, as_module=True)

    @over_rows
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the losses of a batch of rows."""
        batch = self._find(tensordict)
        self._refuse(batch, self._rules(batch))
        y = self._target(batch)  # first, as a sharded model runs with other weights for it
        rows = self._policy_trunk(batch.rows.copy())
        w = batch.at_decisions((y - self.value_min) / (self.value_max - self.value_min)).flatten()
        scorer, states = self._scorer(self.language_actor), self._policy_states(rows)

        def score(place: Tensor, action: Tensor) -> tuple[Tensor, ...]:
            log_prob = scorer.log_softmax(states, place)
            taken = log_prob.gather(-1, action[:, None]).squeeze(-1)
            return weighted_cross_entropy(log_prob, action, w[place], self.rest), taken.exp()

        error, likelihood = over_decisions(self, batch, score)
        losses = {"loss_qvalue": self._reduce_decisions(error, batch)}
        losses["loss_transition"] = environment_loss(self, batch, rows)
        return self._output(batch, losses, {"likelihood": likelihood, "td_target": y})

    @torch.no_grad()
    def _target(self, batch: TransitionBatch) -> Tensor:
        """``y``: the backup of each decision within its bounds, in units of the rewards, ``[N]``."""
        pi = frozen_behavior(self, batch)
        model, span = self.language_actor, self.value_max - self.value_min

        def backup(s: NextStates) -> Tensor:  # max_a pt(a | s') / pi(a | s'), in units of the rewards
            log_prob, log_behavior = (self._valued(policy.log_softmax(s.place), s) for policy in (pt, pi))
            return self.value_min + span * likelihood_ratio_value(log_prob, log_behavior, self.threshold).clamp_max(1.0)

        with lent(self.target_actor_network_params, model):  # once, not for each piece of the states
            pt = Behavior(self._scorer(model), self._policy_states(self._policy_trunk(batch.rows.copy())))
            next_value = next_values(self, batch, backup)
        found = batch.reward + self._discount(batch, next_value) * next_value
        return found.clamp(self.value_min, self.value_max)

    def _valued(self, log_prob: Tensor, at: NextStates) -> Tensor:
        """``-inf`` at the tokens that the policy cannot write, and at ``rest``, whose probability is no value."""
        found = possible(self, log_prob, at)
        if self.rest is None:
            return found
        return found.masked_fill(torch.arange(found.shape[-1], device=found.device) == self.rest, -torch.inf)

    def _rules(self, batch: TransitionBatch) -> list[tuple[Tensor, str]]:
        """Where returns are no probabilities, or the agent wrote what takes the remaining mass, bool ``[N]``."""
        discount = batch.at_decisions(self._discount(batch, batch.reward) * torch.ones_like(batch.reward))
        found = returns_to_go(batch.next_reward, batch.decision, discount).flatten()[batch.place]
        ended = batch.row_terminated[batch.place // batch.decision.shape[-1]]
        slack = 1e-4 * (self.value_max - self.value_min)
        outside = (found < self.value_min - slack) | (found > self.value_max + slack)
        text = f"a return to go outside [{self.value_min}, {self.value_max}] at position {{position}}"
        advice = "values are probabilities, so give value_min and value_max that contain the returns of the data"
        rules = [(ended & outside, f"{text}: {advice}")]
        if self.rest is not None:
            text = "the token rest={token} at position {position}, written by the agent: name one that it never writes"
            rules.append((batch.action == self.rest, f"{text}, or None"))
        return rules
