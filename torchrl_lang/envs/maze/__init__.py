"""The maze of LMRL-Gym (arXiv 2311.18232), fully or partially observed, and its optima with and without memory."""

from torchrl_lang.envs.maze.env import Maze, MazeEnv, maze_texts
from torchrl_lang.envs.maze.optimum import Beliefs, OptimalPlayer, ReactivePlayer, reactive_optimum, reactive_return

__all__ = [
    "Beliefs",
    "Maze",
    "MazeEnv",
    "OptimalPlayer",
    "ReactivePlayer",
    "maze_texts",
    "reactive_optimum",
    "reactive_return",
]
