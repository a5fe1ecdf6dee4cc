"""ILQL joins the good halves of bad walks: it walks a corridor straight, although no walk of its dataset does."""

import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer, corridor_value
from torchrl_lang.evaluation import format_transcript, play_games
from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    qvalue_module,
    value_module,
)
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.training import adamw, train_steps

torch.manual_seed(0)
env = CorridorEnv(length=4, start=0, batch_size=[256], seed=0)
walks = rows_from_rollout(
    env.rollout(64, CorridorPlayer(env.tokenizer, 4), break_when_any_done=False), unfinished="drop"
)

vocabulary = env.tokenizer.vocab_size
lm = causal_lm(vocab_size=vocabulary, layers=1, width=32, heads=2, max_length=48, initializer_range=0.1)
actor = language_actor(lm)
q, v = qvalue_module(QValueHead(32, vocabulary)), value_module(ValueHead(32))
loss = ILQLLoss(actor, q, v, expectile=0.9, cql_weight=0.001, actor_normalizer="action")
batches, optimizer, target = row_buffer(walks, 64), adamw(loss, 5e-3), SoftUpdate(loss, tau=0.05)
for step, figures in train_steps(loss, batches.sample, optimizer, steps=500, target_updater=target, max_grad_norm=1.0):
    if step % 100 == 0:
        print(f"step {step}: loss {figures['loss']:.3f}")

for beta in (0.0, 32.0):
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=beta) if beta else None
    policy = UtteranceActor(actor, env.tokenizer.control, action_length=2, guidance=guidance)
    games = play_games(env, policy, games=256, seed=1)
    print(f"beta {beta:g}: mean return {games.returns.mean():.2f} (data {walks['token_reward'].sum(-1).mean():.2f})")
print(f"the best walk returns {corridor_value(3).item():.0f}; ours:")
print(format_transcript(games.rows[0], env.tokenizer))
