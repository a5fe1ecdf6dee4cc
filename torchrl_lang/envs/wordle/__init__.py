"""Wordle: the environment, its words, scripted policies, the exact solver, and games in a terminal.

Datasets beyond games of one policy are made by :class:`BranchedGames` and :class:`AdversarialGames` (which branch off
from an expert's), :class:`HumanGames`, and :mod:`~torchrl_lang.envs.wordle.transcript` (under other words or rules).
"""

from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.human import HumanGames
from torchrl_lang.envs.wordle.mixtures import MixturePlayer, MonteCarloPlayer
from torchrl_lang.envs.wordle.optimal import OptimalPlayer
from torchrl_lang.envs.wordle.players import Player, RandomWordPlayer, RepeatPlayer, StartWordPlayer, WrongPlayer
from torchrl_lang.envs.wordle.samplers import AdversarialGames, BranchedGames
from torchrl_lang.envs.wordle.solver import solve
from torchrl_lang.envs.wordle.terminal import UserPlayer, play_human
from torchrl_lang.envs.wordle.transcript import consistent_words, count_consistent
from torchrl_lang.envs.wordle.tree import TreePlayer, expected_return
from torchrl_lang.envs.wordle.words import WordIndex, demo_words, guess_words, random_words, wordle_tokenizer

__all__ = [
    "AdversarialGames",
    "BranchedGames",
    "HumanGames",
    "MixturePlayer",
    "MonteCarloPlayer",
    "OptimalPlayer",
    "Player",
    "RandomWordPlayer",
    "RepeatPlayer",
    "StartWordPlayer",
    "TreePlayer",
    "UserPlayer",
    "WordIndex",
    "WordleEnv",
    "WrongPlayer",
    "consistent_words",
    "count_consistent",
    "demo_words",
    "expected_return",
    "guess_words",
    "play_human",
    "random_words",
    "solve",
    "wordle_tokenizer",
]
