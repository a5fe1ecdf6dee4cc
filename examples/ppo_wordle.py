"""PPO on Wordle: a TorchRL collector plays, whole games are the rows, a divergence from the start is paid for.

The start imitates a player who guesses words at random. Log-probabilities of acting are reused, never recomputed; the
reference costs one pass over each row.
"""

import torch
from torchrl.collectors import Collector

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.training import adamw, total_loss, train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

torch.manual_seed(0)
words = ["crane", "slate", "purge", "mouse", "point", "shirt", "blank", "money"]
env = WordleEnv(words, batch_size=[128], max_tries=4, seed=0)
lm = causal_lm(vocab_size=35, layers=2, width=48, heads=4, max_length=env.row_length + 6, initializer_range=0.14)
actor, value = language_actor(lm), value_module(ValueHead(48))

games = env.rollout(4, RandomWordPlayer(words, seed=0), break_when_any_done=False)
buffer, copying = row_buffer(rows_from_rollout(games, unfinished="drop"), 64, seed=0), BCLoss(actor)
for _ in train_steps(copying, buffer.sample, adamw(copying, 3e-3), steps=200):
    pass

policy = UtteranceActor(actor, env.tokenizer.control, action_length=6, seed=0)
near = KLConstrainedTransform(
    RowReference(frozen_copy(policy)), AdaptiveKLController(0.1, target=4.0, horizon=500), estimator="k1"
)
# Values that are wrong by whole points would, through the trunk, undo what was copied: they only read its states.
loss = PPOLoss(policy, value, detach_value=True)
optimizer = adamw(loss, 1e-3)
frames = 128 * 4  # one game in each environment
collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames * 60, reset_at_each_iter=True)
for iteration, steps in enumerate(collector):
    rows = near(rows_from_rollout(steps, unfinished="drop", carry=["token_log_prob"]))
    near.update(rows)
    rows = loss.estimate(rows)
    for _ in range(3):
        for batch in rows.split(64):
            total_loss(loss(batch)).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if iteration % 10 == 0 or iteration == 59:
        print(
            f"{iteration:3d}: return {rows['raw_reward'].sum(-1).mean():6.2f}, KL to the start "
            f"{rows['kl'].sum(-1).mean():5.2f} nats a game (target 4), coefficient {float(near.coef):.3f}"
        )
collector.shutdown()
