"""Makers of Wordle games: branched, adversarial, replayed under other rules, and refit to games of people."""

from torchrl_lang.envs.wordle.makers.adversarial import AdversarialGames
from torchrl_lang.envs.wordle.makers.branched import BranchedGames
from torchrl_lang.envs.wordle.makers.continuing import continue_games, rows_before
from torchrl_lang.envs.wordle.makers.human import HumanGames
from torchrl_lang.envs.wordle.makers.pairs import GuessPair, guess_pairs
from torchrl_lang.envs.wordle.makers.replayed import Replayed, replay_games
from torchrl_lang.envs.wordle.makers.tweets import PUZZLES, TweetGames, example_tweets, load_answers, read_tweets

__all__ = [
    "PUZZLES",
    "AdversarialGames",
    "BranchedGames",
    "GuessPair",
    "HumanGames",
    "Replayed",
    "TweetGames",
    "continue_games",
    "example_tweets",
    "guess_pairs",
    "load_answers",
    "read_tweets",
    "replay_games",
    "rows_before",
]
