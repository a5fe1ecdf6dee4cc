"""Small games with a known optimal policy: for tests, as examples of language tasks, and in words for chat models."""

from torchrl_lang.envs.games.corridor import CorridorEnv, CorridorPlayer, corridor_value
from torchrl_lang.envs.games.guess import GuessNumber, GuessPlayer
from torchrl_lang.envs.games.shop import Shop, ShopPlayer

__all__ = ["CorridorEnv", "CorridorPlayer", "GuessNumber", "GuessPlayer", "Shop", "ShopPlayer", "corridor_value"]
