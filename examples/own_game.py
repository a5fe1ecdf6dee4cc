"""Your own text game in plain Python, played side by side in a TorchRL environment, and its games as text."""

import random

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs import TextGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer, from_row


class Coins:
    """Write how many of three coins show heads."""

    def reset(self, seed):
        coin = random.Random(seed)
        self.heads = sum(coin.random() < 0.5 for _ in range(3))
        return "how many"

    def step(self, text):
        right = text == str(self.heads)
        return ("yes" if right else "no"), (1.0 if right else -0.1), right


tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz 0123")


def make_env(batch_size=4):
    return TextGameEnv(Coins, tokenizer, row_length=40, action_length=2, max_turns=4, batch_size=batch_size, seed=0)


check_language_env(make_env())
env = make_env()
rollout = env.rollout(8, break_when_any_done=False)  # random tokens: most actions make no sense
rows = rows_from_rollout(rollout, unfinished="truncate")
for turn in from_row(rows[0], tokenizer).turns:
    print("environment" if turn.reward is None else f"agent ({turn.reward:+.1f})", repr(turn.text))
print(f"{len(rows)} games, mean return {rows['token_reward'].sum(-1).mean():.2f}")
