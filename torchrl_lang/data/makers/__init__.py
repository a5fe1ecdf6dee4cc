"""Makers of games: rows by number, in memory, on disk in parts, or fresh ones without end."""

from torchrl_lang.data.makers.base import GameMaker, PolicyGames, play_to_end, seed_of_games
from torchrl_lang.data.makers.fresh import FreshGames
from torchrl_lang.data.makers.parts import generate_in_parts

__all__ = ["FreshGames", "GameMaker", "PolicyGames", "generate_in_parts", "play_to_end", "seed_of_games"]
