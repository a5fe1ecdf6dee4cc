"""Small tasks whose goal is hidden, for learning in context: dark rooms and Bernoulli bandits (arXiv 2210.14215)."""

from torchrl_lang.envs.grids.bandit import BernoulliBanditEnv, random_bandits
from torchrl_lang.envs.grids.base import HiddenTaskEnv
from torchrl_lang.envs.grids.rooms import DarkKeyDoorEnv, DarkRoomEnv

__all__ = ["BernoulliBanditEnv", "DarkKeyDoorEnv", "DarkRoomEnv", "HiddenTaskEnv", "random_bandits"]
