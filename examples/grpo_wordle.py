"""GRPO on Wordle by TorchRL's own loss: sixteen games of each hidden word, each scored relative to the others.

The start imitates a player who guesses words at random. There are no values: what a game is worth is known from the
games that began as it did, the ``group_size`` of the environment.
"""

import torch
from torchrl.objectives.llm import GRPOLoss

from torchrl_lang.data import row_buffer, row_returns, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.functional import group_advantages
from torchrl_lang.modules import RowTokenActor, UtteranceActor, causal_lm, language_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.training import adamw, train_steps

torch.manual_seed(0)
words = ["crane", "slate", "purge", "mouse", "point", "shirt", "blank", "money"]
env = WordleEnv(words, batch_size=[128], max_tries=4, group_size=16, seed=0)
lm = causal_lm(vocab_size=35, layers=2, width=48, heads=4, max_length=env.row_length + 6, initializer_range=0.14)
actor = language_actor(lm)


def play(policy, carry=()):
    """One game of each row; all run until the last has ended."""
    steps = env.rollout(4, policy, break_when_any_done=False, break_when_all_done=True)
    return rows_from_rollout(steps, unfinished="drop", carry=carry)


copying = BCLoss(actor)
buffer = row_buffer(play(RandomWordPlayer(words, seed=0)), 64, seed=0)
for _ in train_steps(copying, buffer.sample, adamw(copying, 3e-3), steps=150):
    pass

policy = UtteranceActor(actor, env.tokenizer.control, action_length=6, seed=0)
loss = GRPOLoss(RowTokenActor(policy), entropy_bonus=False)
loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
optimizer = adamw(loss, 1e-3)
for iteration in range(19):
    rows = play(policy, ["token_log_prob"])
    returns = row_returns(rows)
    rows["advantage"] = group_advantages(returns.float(), rows["group"])[:, None, None]
    for batch in [batch for _ in range(2) for batch in rows[torch.randperm(len(rows))].split(64)]:
        loss(batch).loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if iteration % 6 == 0:
        solved = (returns > -4).double()  # a try costs 1, and the one that solves it nothing
        print(f"{iteration:3d}: return {returns.mean():6.2f}, solved {solved.mean():.2f}")
