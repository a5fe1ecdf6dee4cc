"""A language model kept near its reference: policy gradient on rows of Wordle, its divergence steered to a target.

The reference is a model that imitates a mediocre player. The transform stands behind the conversion to rows, so every
row costs the reference one pass; the policy's log-probabilities are those that acting wrote, nothing is computed twice.
"""

import torch

from torchrl_lang.data import row_buffer, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.functional import decision_mask, returns_to_go, shift_left
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, row_log_prob
from torchrl_lang.objectives import BCLoss
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

torch.manual_seed(0)
words = ["crane", "slate", "purge", "mouse"]
env = WordleEnv(words, batch_size=[128], max_tries=3, seed=0)
lm = causal_lm(vocab_size=35, layers=2, width=48, heads=4, max_length=env.row_length + 6, initializer_range=0.14)
actor = language_actor(lm)
policy = UtteranceActor(actor, env.tokenizer.control, action_length=6, seed=0)


def play(player):
    """One game in each environment, as rows."""
    return env.rollout(3, player, break_when_any_done=False)


imitated = rows_from_rollout(play(RandomWordPlayer(words, seed=0)), unfinished="drop")
buffer, loss = row_buffer(imitated, 64, seed=0), BCLoss(actor)
for _ in train_steps(loss, buffer.sample, adamw(loss, 3e-3), steps=150):
    pass

target = 2.0
controller = AdaptiveKLController(0.1, target=target, horizon=1280)
near = KLConstrainedTransform(RowReference(frozen_copy(policy)), controller, estimator="k1")
optimizer = adamw(actor, 1e-3)
for iteration in range(61):
    rows = rows_from_rollout(play(policy), unfinished="truncate", carry=["token_log_prob"])
    rows = near(rows)  # token_reward is now R - coef * KL, the raw one stands in raw_reward
    near.update(rows)
    agent = rows["agent_mask"]
    to_go = returns_to_go(shift_left(rows["token_reward"]), decision_mask(agent), 1.0)
    advantage = torch.where(agent, to_go.roll(1, -1), 0)
    advantage = (advantage - advantage[agent].mean()) / advantage[agent].std()
    optimizer.zero_grad()
    (-(advantage * row_log_prob(policy, rows))[agent].mean()).backward()
    optimizer.step()
    if iteration % 10 == 0:
        print(
            f"{iteration:3d}: return {rows['raw_reward'].sum(-1).mean():6.2f}, KL to the reference "
            f"{rows['kl'].sum(-1).mean():5.2f} nats a game (target {target}), coefficient {float(near.coef):.3f}"
        )
