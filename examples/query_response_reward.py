"""PPO and GRPO on queries, responses and rewards, without an environment: what TRL's ``PPOTrainer.step`` took.

The right response is the query in reverse; each letter in its place earns a half, so the best mean reward is 1. Here
a policy in this process responds. A server may do that as well: give the ids that it sampled, never their text encoded
again, and their log-probabilities if it has them.
"""

import torch
from torchrl.objectives.llm import GRPOLoss

from torchrl_lang.data import row_buffer, rows_from_triples
from torchrl_lang.functional import group_advantages
from torchrl_lang.modules import (
    RowTokenActor,
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
from torchrl_lang.training import adamw, train_steps
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, RowReference, frozen_copy

tokenizer = CharTokenizer.from_alphabet("abcd")
control, length = tokenizer.control, 10  # <s>, two letters, </s>, at most three letters with </a>, </eod>: 8 tokens
queries = [first + second for first in "abcd" for second in "abcd"] * 16
prompts = to_rows([Episode([Turn(query)], terminated=False) for query in queries], tokenizer, length)


def new_policy():
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=10, layers=1, width=32, heads=2, max_length=length + 3, initializer_range=0.15)
    return UtteranceActor(language_actor(lm), control, action_length=3, seed=0)


def respond(policy):
    """The sampled ids, padded, and their log-probabilities: stands for your own loop or server."""
    answers = policy(prompts.copy())
    return answers["action"], answers["token_log_prob"]


def score(query, ids):
    """The share of right letters of a response of two letters; all others earn nothing."""
    text = tokenizer.decode([token for token in ids if token not in (control.end_of_action, control.pad)])
    return sum(a == b for a, b in zip(text, query[::-1], strict=True)) / 2 if len(text) == 2 else 0.0


policy, value = new_policy(), value_module(ValueHead(32))
loss = PPOLoss(policy, value, detach_value=True)
optimizer = adamw(loss, 2e-3)
near = KLConstrainedTransform(RowReference(frozen_copy(policy)), AdaptiveKLController(0.02, target=3.0, horizon=5000))
for iteration in range(16):
    responses, log_probs = respond(policy)
    rewards = list(map(score, queries, responses))
    rows = near(rows_from_triples(queries, responses, rewards, tokenizer, length, log_probs=log_probs))
    near.update(rows)  # token_reward is R - coef * KL, and the coefficient follows its target
    rows = loss.estimate(rows)
    for _ in train_steps(loss, row_buffer(rows, 64, seed=iteration).sample, optimizer, steps=12, max_grad_norm=1.0):
        pass  # three epochs
    if iteration % 5 == 0:
        kl = rows["kl"].sum(-1).mean()
        print(f"PPO  {iteration:3d}: mean reward {sum(rewards) / len(rewards):.2f}, KL to the start {kl:z.2f} nats")

policy = new_policy()
loss = GRPOLoss(RowTokenActor(policy), entropy_bonus=False)
loss.set_keys(action="tokens", sample_log_prob="token_log_prob")
optimizer = adamw(loss, 2e-3)
for iteration in range(16):
    responses, _ = respond(policy)  # a server without log-probabilities
    rewards = list(map(score, queries, responses))
    rows = rows_from_triples(queries, responses, rewards, tokenizer, length)
    with torch.no_grad():
        rows["token_log_prob"] = row_log_prob(policy, rows)
    rows["advantage"] = group_advantages(torch.tensor(rewards), rows["group"])[:, None, None]
    for _ in train_steps(loss, row_buffer(rows, 64, seed=iteration).sample, optimizer, steps=12, max_grad_norm=1.0):
        pass
    if iteration % 5 == 0:
        print(f"GRPO {iteration:3d}: mean reward {sum(rewards) / len(rewards):.2f}")
