"""Language tasks as TorchRL environments."""

from torchrl_lang.envs.adapters.chat_env import GameChatEnv
from torchrl_lang.envs.adapters.env_game import EnvGame
from torchrl_lang.envs.adapters.gem import GemGame
from torchrl_lang.envs.adapters.gymnasium import GymnasiumGame
from torchrl_lang.envs.adapters.openenv import OpenEnvGame
from torchrl_lang.envs.adapters.textarena import TextArenaGame
from torchrl_lang.envs.adapters.tools import ToolGame
from torchrl_lang.envs.adapters.trl import trl_environment
from torchrl_lang.envs.check import check_language_env
from torchrl_lang.envs.compiled_rollout import CompiledRollout
from torchrl_lang.envs.game_turn import TextGame
from torchrl_lang.envs.language_env import LanguageEnv
from torchrl_lang.envs.long_game import LongGameEnv
from torchrl_lang.envs.prompt_env import PromptEnv
from torchrl_lang.envs.text_game import TextGameEnv
from torchrl_lang.envs.text_player import TextPlayer
from torchrl_lang.envs.token_env import TokenEnv
from torchrl_lang.envs.wordle import WordleEnv

__all__ = [
    "CompiledRollout",
    "EnvGame",
    "GameChatEnv",
    "GemGame",
    "GymnasiumGame",
    "LanguageEnv",
    "LongGameEnv",
    "OpenEnvGame",
    "PromptEnv",
    "TextArenaGame",
    "TextGame",
    "TextGameEnv",
    "TextPlayer",
    "TokenEnv",
    "ToolGame",
    "WordleEnv",
    "check_language_env",
    "trl_environment",
]
