"""PPO on Wordle with a critic that sees the hidden word, beside one that sees what the policy sees.

Both critics have a language model of their own, and both policies start from the same imitation of a random player.
The hidden word decides much of the return, so the privileged critic explains more of its variance.
"""

from copy import deepcopy

import torch
from torchrl.collectors import Collector

from torchrl_lang.data import EpisodeRows, row_buffer, rows_from_rollout
from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.wordle import RandomWordPlayer
from torchrl_lang.modules import (
    PrivilegedTrunk,
    Trunk,
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    value_module,
)
from torchrl_lang.modules.trunk import trunk_module
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.training import adamw, train_steps

WORDS = ["crane", "slate", "purge", "mouse", "point", "shirt", "blank", "money"]
MODEL = {"vocab_size": 35, "layers": 2, "width": 48, "heads": 4, "initializer_range": 0.14}
ITERATIONS, GAMES, TRIES = 30, 128, 4


def imitate():
    """The start of both: a language model that plays like a random player."""
    torch.manual_seed(0)
    env = WordleEnv(WORDS, [GAMES], max_tries=TRIES, seed=0)
    lm = causal_lm(**MODEL, max_length=env.row_length + 6)
    loss = BCLoss(language_actor(lm))
    games = env.rollout(TRIES, RandomWordPlayer(WORDS, seed=0), break_when_any_done=False)
    buffer = row_buffer(rows_from_rollout(games, unfinished="drop"), 64, seed=0)
    for _ in train_steps(loss, buffer.sample, adamw(loss, 3e-3), steps=200):
        pass
    return lm


def train(start, privileged):
    """Mean return and explained variance of each iteration."""
    torch.manual_seed(0)
    env = WordleEnv(WORDS, [GAMES], max_tries=TRIES, privileged=True, seed=0)
    policy = UtteranceActor(language_actor(deepcopy(start)), env.tokenizer.control, env.action_length, seed=0)
    own = Trunk(causal_lm(**MODEL, max_length=env.row_length + 6))
    critic = PrivilegedTrunk(own) if privileged else trunk_module(own)
    loss = PPOLoss(policy, value_module(ValueHead(48)), value_trunk=critic)
    optimizer = adamw(loss, 1e-3)
    collector = Collector(env, policy, frames_per_batch=GAMES * TRIES, total_frames=GAMES * TRIES * ITERATIONS)
    rows_of, found = EpisodeRows(carry=["token_log_prob"], keep=["privileged"]), []
    for iteration, steps in enumerate(collector):
        rows = loss.estimate(rows_of(steps))
        buffer = row_buffer(rows, 64, seed=iteration)
        steps_taken = list(train_steps(loss, buffer.sample, optimizer, steps=8, max_grad_norm=1.0))
        explained = steps_taken[-1][1]["explained_variance"]
        found.append((float(rows["token_reward"].sum(-1).mean()), float(explained)))
    collector.shutdown()
    return found


names = {"what the policy sees": False, "the hidden word as well": True}
start = imitate()
curves = {name: train(start, privileged) for name, privileged in names.items()}
print(f"{'the critic sees':<24} {'iterations':>10} {'return':>7} {'explained variance':>19}")
for name, curve in curves.items():
    for first in range(0, ITERATIONS, 10):
        part = torch.tensor(curve[first : first + 10]).mean(0).tolist()
        print(f"{name:<24} {first + 1:>4} to {first + 10:>2} {part[0]:>7.2f} {part[1]:>19.2f}")
