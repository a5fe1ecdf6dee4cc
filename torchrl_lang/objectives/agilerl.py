"""The ILQL loss of an agent that AgileRL trained."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import nn
from torchrl.objectives import SoftUpdate

from torchrl_lang.modules.actor import language_actor
from torchrl_lang.modules.agilerl.checkpoint import AgileRLAgent
from torchrl_lang.modules.head_values import qvalue_module, value_module
from torchrl_lang.modules.trunk import Trunk, trunk_module
from torchrl_lang.objectives.ilql import ILQLLoss


def agilerl_loss(agent: AgileRLAgent, **options: Any) -> tuple[ILQLLoss, SoftUpdate]:
    """Build the loss that continues to train an agent of AgileRL's ILQL, with its three trunks, targets and options.

    It comes with the updater of its targets, because to make one sets the targets to the trained weights.

    Its weights are shared with ``agent``, except those of the targets, which are copied. AgileRL gives the weights of
    the terms with each call: give them here.

    With ``detach_actor`` (AgileRL's ``detach_pi``) the policy's head is all three layers of AgileRL's, trained on a
    detached transformer; otherwise it is the last one. Save ``agent.policy``, which shares the weights.

    Args:
        agent: the result of :func:`~torchrl_lang.modules.read_agilerl`.
        **options: of :class:`ILQLLoss`, in place of the agent's.

    Returns:
        The loss, and its updater with the agent's ``alpha``: call its ``step()`` after each of the optimizer's.

    Examples:
        >>> from torchrl_lang.modules import QValueHead, ValueHead, causal_lm
        >>> from torchrl_lang.modules.agilerl.checkpoint import AgileRLAgent
        >>> from torchrl_lang.objectives import agilerl_loss
        >>> lms = [causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16) for _ in range(3)]
        >>> heads = QValueHead(8, 11), ValueHead(8), QValueHead(8, 11)
        >>> agent = AgileRLAgent(*lms, *heads, {"gamma": 0.9}, {"tau": 0.01})
        >>> loss, updater = agilerl_loss(agent, actor_weight=0.0)
        >>> loss.gamma, loss.actor_weight, loss.has_target_trunk
        (0.9, 0.0, True)
    """
    trunk, heads = trunk_module(Trunk(agent.values)), (qvalue_module(agent.qvalue), value_module(agent.value))
    options = {**agent.options, **options}
    model: Any = agent.policy
    if options.get("detach_actor"):  # AgileRL's detach_pi, whose cut lies before the hidden layers of the head
        head = nn.Sequential(*model.transformer.policy, model.lm_head)
        actor = language_actor(Trunk(model.transformer.gpt), head=head)
    else:
        actor = language_actor(model)
    loss = ILQLLoss(actor, *heads, value_trunk=trunk, target_trunk=True, **options)
    updater = SoftUpdate(loss, tau=agent.training["tau"])
    frozen = TensorDict.from_module(agent.target_qvalue)
    loss.target_qvalue_network_params.get("module").data.update_(frozen.data)
    frozen = TensorDict.from_module(trunk_module(Trunk(agent.target)))
    loss.target_value_trunk_params.data.update_(frozen.data)
    return loss, updater
