"""Eight offline losses in TorchRL's ``Trainer``: from random walks on a graph to a policy that finds short paths.

``python examples/offline_trainer.py ilql chai`` trains these two; without names, all eight, a few seconds each.
"""

import functools
import sys

import torch
from torchrl.objectives import SoftUpdate
from torchrl.trainers import DefaultOptimizationStepper, TargetNetUpdaterHook, Trainer

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.random_walks import RandomWalkPlayer, RandomWalksEnv, random_graph
from torchrl_lang.evaluation import play_games
from torchrl_lang.modules import (
    CandidateSampler,
    CHAIActor,
    QValueHead,
    ReturnConditionedActor,
    ReturnEmbedding,
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueGuidance,
    ValueHead,
    causal_lm,
    condition_on_returns,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import (
    BCLoss,
    BCQLoss,
    CHAILoss,
    CQLLoss,
    DecisionTransformerLoss,
    ILQLLoss,
    PsiLoss,
    UtteranceILQLLoss,
)
from torchrl_lang.training import OfflineCollector, adamw

graph = random_graph(12, out_degree=2, seed=4)
env = RandomWalksEnv(graph, max_turns=8, batch_size=[256], seed=0)
rollout = env.rollout(8 * 8, RandomWalkPlayer(graph, env.tokenizer, seed=0), break_when_any_done=False)
walks = rows_from_rollout(rollout, unfinished="drop")[:1000]
returns = walks["token_reward"].sum(-1)
vocabulary, width = env.tokenizer.vocab_size, 32


def new_actor():
    shape = {"layers": 1, "width": width, "heads": 2, "max_length": env.row_length + 2}
    return language_actor(causal_lm(vocab_size=vocabulary, **shape, initializer_range=width**-0.5))


def token_q():
    return qvalue_module(QValueHead(width, vocabulary))


def utterance_q():
    return qvalue_module(UtteranceQValueHead(width))


def conditioned_actor():
    """A policy that is asked for the mean return of the best tenth of the walks."""
    target = returns.topk(len(returns) // 10).values.mean().item()
    return condition_on_returns(new_actor(), ReturnEmbedding(width, returns.min().item(), 0.0, target=target))


@functools.cache
def copied():
    """Behaviour cloning of the walks, environment included: CHAI chooses among what it samples."""
    loss = BCLoss(new_actor(), transition_weight=1.0)
    train(loss, walks)
    return writer(loss.actor_network)


def writer(actor, **decoding):
    return UtteranceActor(actor, env.tokenizer.control, action_length=2, seed=0, **decoding)


def by_logits_and_values(loss):
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=2.0)
    return writer(loss.language_actor, guidance=guidance, method="greedy")


def by_values(loss, **decoding):
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=1.0, include_logits=False)
    return writer(loss.language_actor, guidance=guidance, min_p=loss.threshold, **decoding)


def best_candidate(loss):
    guidance = UtteranceValueGuidance(loss.target_qvalue_network())
    options = {"candidates": 8, "end_value_weight": 1.0, "log_prob_weight": 0.0}
    return writer(loss.actor_network, guidance=guidance, method="best_of", **options)


# The loss of each algorithm, and the policy that goes with it.
METHODS = {
    "bc": (lambda: BCLoss(new_actor()), lambda loss: writer(loss.actor_network)),
    "dt": (
        lambda: DecisionTransformerLoss(conditioned_actor()),
        lambda loss: ReturnConditionedActor(writer(loss.actor_network, method="greedy")),
    ),
    "ilql": (
        lambda: ILQLLoss(new_actor(), token_q(), value_module(ValueHead(width)), expectile=0.9, cql_weight=0.05),
        by_logits_and_values,
    ),
    "cql": (lambda: CQLLoss(writer(new_actor()), token_q(), cql_weight=0.2), by_logits_and_values),
    "bcq": (
        lambda: BCQLoss(writer(new_actor()), token_q(), threshold=0.3),
        lambda loss: by_values(loss, method="greedy"),
    ),
    "psi": (lambda: PsiLoss(writer(new_actor()), token_q(), reward_scale=0.5, threshold=0.05), by_values),
    "utterance_ilql": (
        lambda: UtteranceILQLLoss(new_actor(), utterance_q(), value_module(ValueHead(width)), expectile=0.9),
        best_candidate,
    ),
    "chai": (
        lambda: CHAILoss(utterance_q()),
        lambda loss: CHAIActor(copied(), loss.target_qvalue_network(), candidates=8),
    ),
}


def train(loss, rows):
    trainer = Trainer(
        collector=OfflineCollector(row_buffer(rows, batch_size=50, seed=0)),
        total_frames=len(rows) * 10,  # a frame is a row
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=adamw(loss, 5e-3),
        optimization_stepper=DefaultOptimizationStepper(),
        clip_norm=1.0,
        progress_bar=False,
    )
    if any(name.startswith("target_") for name in loss.state_dict()):
        TargetNetUpdaterHook(SoftUpdate(loss, tau=0.05)).register(trainer, "target_updater")
    trainer.train()


print(f"mean return of the data {returns.mean():.2f}, of shortest paths {-graph.distance[1:].float().mean():.2f}")
for name in sys.argv[1:] or METHODS:
    torch.manual_seed(0)
    make_loss, make_policy = METHODS[name]
    loss = make_loss()
    train(loss, CandidateSampler(copied(), candidates=5)(walks) if name == "chai" else walks)
    games = play_games(env, make_policy(loss), games=256, seed=1)
    print(f"{name:15} mean return {games.returns.mean():.2f} (data {returns.mean():.2f})")
