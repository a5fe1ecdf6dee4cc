"""TextWorld games (the extra ``textworld``) as a batched language environment."""

from torchrl_lang.envs.textworld.env import TextWorldEnv
from torchrl_lang.envs.textworld.games import TextWorldSpec, build_games
from torchrl_lang.envs.textworld.players import ExpertPlayer, RandomAdmissiblePlayer

__all__ = ["ExpertPlayer", "RandomAdmissiblePlayer", "TextWorldEnv", "TextWorldSpec", "build_games"]
