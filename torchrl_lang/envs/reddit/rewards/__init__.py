"""Rewards of texts."""

from torchrl_lang.envs.reddit.rewards.protocol import TextReward, rewards_of

__all__ = ["TextReward", "rewards_of"]
