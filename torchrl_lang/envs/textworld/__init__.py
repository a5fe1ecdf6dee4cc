"""TextWorld games (the extra ``textworld``) as a batched language environment."""

from torchrl_lang.envs.textworld.engine import EnginePool
from torchrl_lang.envs.textworld.env import TextWorldEnv
from torchrl_lang.envs.textworld.game_sets import GameSets, solution, split_games
from torchrl_lang.envs.textworld.games import TextWorldSpec, build_games, game_texts
from torchrl_lang.envs.textworld.players import ExpertPlayer, RandomAdmissiblePlayer
from torchrl_lang.envs.textworld.text import (
    TEMPLATES,
    Template,
    clean_command,
    clean_feedback,
    is_meta,
)
from torchrl_lang.text.tokenizers import word_tokenizer

__all__ = [
    "TEMPLATES",
    "EnginePool",
    "ExpertPlayer",
    "GameSets",
    "RandomAdmissiblePlayer",
    "Template",
    "TextWorldEnv",
    "TextWorldSpec",
    "build_games",
    "clean_command",
    "clean_feedback",
    "game_texts",
    "is_meta",
    "solution",
    "split_games",
    "word_tokenizer",
]
