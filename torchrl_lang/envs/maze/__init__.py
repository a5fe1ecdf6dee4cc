"""The maze of LMRL-Gym (arXiv 2311.18232), fully or partially observed, and its optima with and without memory."""

from torchrl_lang.envs.maze.env import MazeEnv, MazeTexts, maze_texts
from torchrl_lang.envs.maze.grid import DOUBLE_T, MOVES, Maze, Observation
from torchrl_lang.envs.maze.optimum import Beliefs, reactive_optimum, reactive_return
from torchrl_lang.envs.maze.players import OptimalPlayer, ReactivePlayer

__all__ = [
    "DOUBLE_T",
    "MOVES",
    "Beliefs",
    "Maze",
    "MazeEnv",
    "MazeTexts",
    "Observation",
    "OptimalPlayer",
    "ReactivePlayer",
    "maze_texts",
    "reactive_optimum",
    "reactive_return",
]
