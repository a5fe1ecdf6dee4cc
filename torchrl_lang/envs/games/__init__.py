"""A small game with a known optimal policy, for tests and as an example of a language task."""

from torchrl_lang.envs.games.corridor import CorridorEnv, CorridorPlayer, corridor_value

__all__ = ["CorridorEnv", "CorridorPlayer", "corridor_value"]
