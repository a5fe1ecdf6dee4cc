"""Wordle: the environment, its word lists, scripted policies, and makers of games."""

from torchrl_lang.envs.wordle.candidate_sets import CandidateSets, unpack_words
from torchrl_lang.envs.wordle.decision_tree import DecisionTree
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.every_word import WordReturns, expected_return
from torchrl_lang.envs.wordle.exact_values import ExactValues
from torchrl_lang.envs.wordle.makers import (
    PUZZLES,
    AdversarialGames,
    BranchedGames,
    GuessPair,
    HumanGames,
    Replayed,
    TweetGames,
    continue_games,
    example_tweets,
    guess_pairs,
    load_answers,
    read_tweets,
    replay_games,
    rows_before,
)
from torchrl_lang.envs.wordle.mixture_player import MixturePlayer
from torchrl_lang.envs.wordle.monte_carlo_player import MonteCarloPlayer
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
from torchrl_lang.envs.wordle.solver import solve
from torchrl_lang.envs.wordle.start_word_player import StartWordPlayer
from torchrl_lang.envs.wordle.terminal import play_human, render_letters, render_row, watch
from torchrl_lang.envs.wordle.transcript import Turns, read_turns
from torchrl_lang.envs.wordle.tree_player import TreePlayer
from torchrl_lang.envs.wordle.user_player import UserPlayer
from torchrl_lang.envs.wordle.vocabulary import consistent_words, count_consistent, random_words
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
    "PUZZLES",
    "AdversarialGames",
    "BranchedGames",
    "CandidateSets",
    "DecisionTree",
    "ExactValues",
    "GuessPair",
    "HumanGames",
    "MixturePlayer",
    "MonteCarloPlayer",
    "OptimalPlayer",
    "Player",
    "RandomWordPlayer",
    "RepeatPlayer",
    "Replayed",
    "Rules",
    "StartWordPlayer",
    "TreePlayer",
    "Turns",
    "TweetGames",
    "UserPlayer",
    "WordIndex",
    "WordPlayer",
    "WordReturns",
    "WordleEnv",
    "WrongPlayer",
    "common_words",
    "consistent_words",
    "continue_games",
    "count_consistent",
    "demo_words",
    "example_tweets",
    "expected_return",
    "feedback",
    "feedback_code",
    "feedback_table",
    "guess_pairs",
    "guess_words",
    "information_gain",
    "load_answers",
    "load_words",
    "play_human",
    "random_words",
    "read_turns",
    "read_tweets",
    "render_letters",
    "render_row",
    "replay_games",
    "rows_before",
    "solve",
    "unpack_words",
    "watch",
    "wordle_tokenizer",
]
