"""Wordle: the environment, its word lists, and scripted policies."""

from torchrl_lang.envs.wordle.candidate_sets import CandidateSets, unpack_words
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.exact_values import ExactValues
from torchrl_lang.envs.wordle.mixture_player import MixturePlayer
from torchrl_lang.envs.wordle.optimal import OptimalPlayer, information_gain
from torchrl_lang.envs.wordle.rules import Rules, feedback, feedback_code, feedback_table
from torchrl_lang.envs.wordle.scripted_players import (
    OPENERS,
    Player,
    RandomWordPlayer,
    RepeatPlayer,
    WordPlayer,
    WrongPlayer,
)
from torchrl_lang.envs.wordle.terminal import play_human, render_letters, render_row, watch
from torchrl_lang.envs.wordle.transcript import Turns, read_turns
from torchrl_lang.envs.wordle.words import (
    WordIndex,
    common_words,
    demo_words,
    guess_words,
    load_words,
    wordle_tokenizer,
)

__all__ = [
    "OPENERS",
    "ExactValues",
    "MixturePlayer",
    "OptimalPlayer",
    "Player",
    "RandomWordPlayer",
    "RepeatPlayer",
    "Rules",
    "Turns",
    "WordIndex",
    "WordPlayer",
    "CandidateSets",
    "WordleEnv",
    "WrongPlayer",
    "common_words",
    "demo_words",
    "feedback",
    "feedback_code",
    "feedback_table",
    "guess_words",
    "information_gain",
    "load_words",
    "play_human",
    "read_turns",
    "render_letters",
    "render_row",
    "unpack_words",
    "watch",
    "wordle_tokenizer",
]
