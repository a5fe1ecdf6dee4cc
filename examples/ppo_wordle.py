"""PPO on Wordle: a TorchRL collector plays, whole games are the rows, a divergence from the start is paid for.

The start imitates a player who guesses words at random. Log-probabilities and values of acting are reused, never
recomputed; the reference costs one pass over each row.
"""

import torch
from torchrl.collectors import Collector

from torchrl_lang.data import EpisodeRows, row_buffer, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.modules import UtteranceActor, ValueHead, causal_lm, language_actor, value_module
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

torch.manual_seed(0)
words = ["crane", "slate", "purge", "mouse", "point", "shirt", "blank", "money"]
env = WordleEnv(words, batch_size=[128], max_tries=4, seed=0)
lm = causal_lm(vocab_size=35, layers=2, width=48, heads=4, max_length=env.row_length + 6, initializer_range=0.14)
actor, value = language_actor(lm), ValueHead(48)

games = env.rollout(4, RandomWordPlayer(words, seed=0), break_when_any_done=False)
buffer, copying = row_buffer(rows_from_rollout(games, unfinished="drop"), 64, seed=0), BCLoss(actor)
for _ in train_steps(copying, buffer.sample, adamw(copying, 3e-3), steps=200):
    pass

policy = UtteranceActor(actor, env.tokenizer.control, action_length=6, value=value, seed=0)
frozen = frozen_copy(UtteranceActor(actor, env.tokenizer.control, action_length=6))
near = KLConstrainedTransform(RowReference(frozen), AdaptiveKLController(0.1, target=4.0, horizon=500))
# Values that are wrong by whole points would, through the trunk, undo what was copied: they only read its states.
loss = PPOLoss(policy, value_module(value), detach_value=True)
optimizer = adamw(loss, 1e-3)
frames = 128 * 4  # a game in each environment, or more; those that still run end in the next batch
collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames * 60)
rows_of = EpisodeRows(carry=["token_log_prob", "state_value"])
for iteration, steps in enumerate(collector):
    rows = near(rows_of(steps))
    near.update(rows)
    rows = loss.estimate(rows, reuse_values=True)
    for _ in train_steps(loss, row_buffer(rows, 64, seed=iteration).sample, optimizer, steps=8, max_grad_norm=1.0):
        pass
    if iteration % 10 == 0 or iteration == 59:
        print(
            f"{iteration:3d}: return {rows['raw_reward'].sum(-1).mean():6.2f}, KL to the start "
            f"{rows['kl'].sum(-1).mean():5.2f} nats a game (target 4), coefficient {float(near.coef):.3f}"
        )
collector.shutdown()
