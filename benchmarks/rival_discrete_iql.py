"""TorchRL's ``DiscreteIQLLoss`` over rows of tokens, on the very same trunk and heads.

TorchRL has no loss for rows of tokens; its nearest is implicit Q-learning for discrete actions. A user who wants it on
text makes every decision a transition: the observation is what the model has read, the action its next token, the next
observation the state of the agent's following token. Two ways lead there:

* a trunk in each network, as its examples build actor, Q and V: every network reads the rows, runs the trunk, and looks
  at the decisions. The weights are shared, the passes are not: the loss asks V three times and the two Q networks three
  times (twice with target parameters), so with the actor's the trunk runs ten times a batch. The two go through
  ``torch.vmap``, as this loss has it; a plain loop over them, which it does not offer, is some 5 % faster;
* one pass of the trunk before the loss, and networks that are only heads, with hidden states as observations.

Both learn exactly what :class:`~torchrl_lang.objectives.ILQLLoss` learns without CQL, margin and advantage weights. The
loss has no CQL term, computes the padding, builds each head's table of values, ``[N, V]``, and computes weights of the
policy even at temperature 0, where all of them are 1. It does not read rows: the transitions, and the jump over
the environment's tokens, are made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.objectives import DiscreteIQLLoss
from transformers import PreTrainedModel

from benchmarks.naive_ilql import NaiveILQL
from torchrl_lang.functional import shift_left
from torchrl_lang.functional.decisions import find_decisions
from torchrl_lang.modules import QValueHead, Trunk, ValueHead

GAMMA, EXPECTILE = 0.99, 0.7


class OneTrunkPass(nn.Module):
    """The trunk runs once, its states are the observations, and the loss has heads for networks."""

    def __init__(self, lm: PreTrainedModel, qvalue: QValueHead, value: ValueHead) -> None:
        super().__init__()
        self.trunk = Trunk(lm, length_groups=1)
        self.loss = _loss(lm, qvalue, value, [])

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        state, next_state, transition = _transitions(rows)
        hidden = self.trunk(rows["tokens"]).flatten(0, 1)  # [B * T, H]
        transition["observation"] = hidden[state]
        transition["next", "observation"] = hidden[next_state].detach()
        return self.loss(transition)


class TrunkInEach(nn.Module):
    """Actor, Q and V are whole networks over rows of tokens that share the trunk's weights."""

    def __init__(self, lm: PreTrainedModel, qvalue: QValueHead, value: ValueHead) -> None:
        super().__init__()
        trunk = TensorDictModule(Trunk(lm, length_groups=1), in_keys=["tokens"], out_keys=["hidden"])
        look = TensorDictModule(_look, in_keys=["hidden", "place"], out_keys=["observation"])
        self.loss = _loss(lm, qvalue, value, [trunk, look])

    def forward(self, rows: TensorDictBase) -> TensorDictBase:
        state, next_state, transition = _transitions(rows)
        transition["tokens"] = transition["next", "tokens"] = rows["tokens"]
        transition["place"], transition["next", "place"] = state, next_state
        return self.loss(transition)


def _look(hidden: Tensor, place: Tensor) -> Tensor:
    """States ``[N, H]`` at places of the flattened ``[B, T, H]``."""
    return hidden.flatten(0, 1)[place]


def _loss(
    lm: PreTrainedModel, qvalue: QValueHead, value: ValueHead, before: Sequence[TensorDictModule]
) -> DiscreteIQLLoss:
    def network(head: nn.Module, key: str) -> TensorDictSequential:
        return TensorDictSequential(*before, TensorDictModule(head, in_keys=["observation"], out_keys=[key]))

    actor = ProbabilisticTensorDictSequential(
        *network(lm.get_output_embeddings(), "logits").module,
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical),
    )
    plain = NaiveILQL(lm, qvalue, value)  # the same heads, one ordinary module each
    loss = DiscreteIQLLoss(
        actor,
        [network(head, "state_action_value") for head in plain.q],
        network(plain.v, "state_value"),
        action_space="categorical",
        loss_function="l2",
        temperature=0.0,
        expectile=EXPECTILE,
    )
    loss.make_value_estimator(gamma=GAMMA)
    return loss


def _transitions(rows: TensorDictBase) -> tuple[Tensor, Tensor, TensorDict]:
    """Places of the ``N`` states and of their successors in the flattened batch, and what else makes a transition."""
    tokens = rows["tokens"]
    found = find_decisions(rows["attention_mask"], rows["agent_mask"])
    place = found.row * tokens.shape[1] + found.position
    state, next_state = place[found.state], place[found.state + 1]
    done = (found.last & rows["terminated"][found.row[found.state], 0]).unsqueeze(-1)
    reward = shift_left(rows["token_reward"]).flatten()[state].unsqueeze(-1)
    after = TensorDict(reward=reward, done=done, terminated=done)
    # Without a batch size: where networks read whole rows, rows and transitions differ in number.
    return state, next_state, TensorDict(action=shift_left(tokens).flatten()[state], next=after)
