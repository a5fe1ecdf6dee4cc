"""Small tasks whose goal is hidden, for learning in context: dark rooms and Bernoulli bandits (arXiv 2210.14215)."""

from torchrl_lang.envs.grids.bandit import BernoulliBanditEnv, random_bandits
from torchrl_lang.envs.grids.base import HiddenTaskEnv
from torchrl_lang.envs.grids.dark_key_door import DarkKeyDoorEnv
from torchrl_lang.envs.grids.dark_room import DarkRoomEnv
from torchrl_lang.envs.grids.room import RoomEnv

__all__ = [
    "BernoulliBanditEnv",
    "DarkKeyDoorEnv",
    "DarkRoomEnv",
    "HiddenTaskEnv",
    "RoomEnv",
    "random_bandits",
]
