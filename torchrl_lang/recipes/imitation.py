"""Algorithms that imitate the data: behaviour cloning and the decision transformer."""

from __future__ import annotations

import warnings

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor

from torchrl_lang.data import row_returns
from torchrl_lang.functional.returns import return_conditions
from torchrl_lang.modules import ReturnConditionedActor, ReturnEmbedding, condition_on_returns
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.objectives import BCLoss, DecisionTransformerLoss
from torchrl_lang.recipes.algorithms import BC, DT
from torchrl_lang.recipes.models import begin, loss_options
from torchrl_lang.recipes.offline import OfflineData, number_to_train
from torchrl_lang.schema import ROW_KEYS


def train_bc(options: BC, data: OfflineData | None = None) -> float:
    """Behaviour cloning on the data of the options or, already opened, on ``data``; see :func:`train_offline`."""
    start = begin(options, data)
    loss = BCLoss(start.actor, **loss_options(options, BCLoss, actor_normalizer="action"))
    return start.train(options, loss, start.policy(method="greedy"), start.save)


def train_dt(options: DT) -> float:
    """The decision transformer; see :func:`train_offline`."""
    start = begin(options)
    end_of_action = start.control.end_of_action
    width = start.model.lm.get_input_embeddings().weight.shape[1]
    returns = build_returns(options, start.data.dataset.rows, width, end_of_action)
    actor = condition_on_returns(start.actor, returns)
    name = options.out.name
    print(f"{name}: asks for the return {returns.target:.2f} of {returns.low:.2f} to {returns.high:.2f}", flush=True)
    more = {"actor_normalizer": "action", "end_of_action": end_of_action}
    loss = DecisionTransformerLoss(actor, **loss_options(options, DecisionTransformerLoss, **more))
    policy = ReturnConditionedActor(start._replace(actor=actor).policy(method="greedy"))
    return start.train(
        options,
        loss,
        policy,
        lambda folder: start.save(folder, returns=returns),
        lambda rows: {"held_out_loss": held_out_loss(actor, rows, end_of_action)},
    )


_BEST = 0.1
"""Share of the episodes whose mean return is the target ``best``."""


def build_returns(options: DT, rows: TensorDictBase, width: int, end_of_action: int) -> ReturnEmbedding:
    """The embedding of the returns of rows ``[N]``, the held-out ones at their end, for a model of this width.

    Its range holds all returns of the rows and a target that is given as a number; one that no row has is a warning.
    """
    wholes, lows, highs = [], [], []
    for part in rows.split(10_000):
        tokens, attention, agent, reward = (part.get(key) for key in ROW_KEYS)
        wholes.append(row_returns(part))
        found = return_conditions(attention, agent, reward, options.mode, tokens=tokens, end_of_action=end_of_action)
        read: Tensor = torch.cat([found.returns[found.mask], wholes[-1]])
        lows.append(float(read.min()))
        highs.append(float(read.max()))
    trained = torch.cat(wholes)[: number_to_train(len(rows), options.held_out)]
    best = trained.topk(max(round(_BEST * len(trained)), 1)).values.mean()
    target = float(best) if options.target_return == "best" else options.target_return
    low, high = min(lows), max(highs)
    if not low <= target <= high:
        known = f"the returns of the data, [{low:g}, {high:g}]: what the policy does then was never trained"
        warnings.warn(f"target_return={target:g} lies outside {known}.", stacklevel=2)
    return ReturnEmbedding(width, min(low, target), max(high, target), mode=options.mode, target=target)


@torch.no_grad()
def held_out_loss(
    actor: ProbabilisticTensorDictSequential, rows: TensorDictBase, end_of_action: int, *, batch_size: int = 256
) -> float:
    """Mean negative log-probability of the agent's tokens given the return of each row, in nats per token.

    Rows as of :func:`~torchrl_lang.evaluation.imitation_loss`, which gives this figure for a policy without returns.
    """
    loss = DecisionTransformerLoss(actor, end_of_action=end_of_action, reduction="sum")
    with eval_mode(actor):
        total = sum(float(loss(part)["loss_actor"]) for part in rows.split(batch_size))
    return total / max(int(rows["agent_mask"].sum()), 1)
