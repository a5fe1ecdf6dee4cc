"""TextWorld games (the extra ``textworld``) as a batched language environment."""

from torchrl_lang.envs.textworld.env import TextWorldEnv
from torchrl_lang.envs.textworld.games import TextWorldSpec, build_games, game_texts
from torchrl_lang.envs.textworld.players import ExpertPlayer, RandomAdmissiblePlayer
from torchrl_lang.envs.textworld.text import Template

__all__ = [
    "ExpertPlayer",
    "RandomAdmissiblePlayer",
    "Template",
    "TextWorldEnv",
    "TextWorldSpec",
    "build_games",
    "game_texts",
]
