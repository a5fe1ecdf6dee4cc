"""Small games with known optimal policies, for tests and as examples of language tasks."""

from torchrl_lang.envs.games.corridor import CorridorEnv, CorridorPlayer, corridor_value
from torchrl_lang.envs.games.guess_number import GuessNumber, binary_search, guess_number_env, guess_number_return

__all__ = [
    "CorridorEnv",
    "CorridorPlayer",
    "GuessNumber",
    "binary_search",
    "corridor_value",
    "guess_number_env",
    "guess_number_return",
]
