"""Language tasks as TorchRL environments."""

from torchrl_lang.envs.adapters.env_game import EnvGame
from torchrl_lang.envs.adapters.gem import GemGame
from torchrl_lang.envs.adapters.gymnasium import GymnasiumGame
from torchrl_lang.envs.adapters.openenv import OpenEnvGame
from torchrl_lang.envs.adapters.textarena import TextArenaGame
from torchrl_lang.envs.adapters.tools import QuestionGame, ToolGame, ToolResult, Tools
from torchrl_lang.envs.adapters.trl import trl_environment
from torchrl_lang.envs.check import LanguageEnvError, check_language_env
from torchrl_lang.envs.compiled_rollout import CompiledRollout
from torchrl_lang.envs.game_turn import ToolText, without_thoughts
from torchrl_lang.envs.language_env import LanguageEnv, Reply, TaskState
from torchrl_lang.envs.long_game import LongGameEnv
from torchrl_lang.envs.prompt_env import PromptEnv
from torchrl_lang.envs.text_game import TextGame, TextGameEnv
from torchrl_lang.envs.token_env import TokenEnv
from torchrl_lang.envs.wordle import WordleEnv

__all__ = [
    "CompiledRollout",
    "EnvGame",
    "GemGame",
    "GymnasiumGame",
    "LanguageEnv",
    "LanguageEnvError",
    "LongGameEnv",
    "OpenEnvGame",
    "PromptEnv",
    "QuestionGame",
    "Reply",
    "TaskState",
    "TextArenaGame",
    "TextGame",
    "TextGameEnv",
    "TokenEnv",
    "ToolGame",
    "ToolResult",
    "ToolText",
    "Tools",
    "WordleEnv",
    "check_language_env",
    "trl_environment",
    "without_thoughts",
]
