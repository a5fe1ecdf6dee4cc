"""What the commands share that train several methods and compare them: their options, and their players."""

from torchrl_lang.recipes.comparison.options import ComparisonOptions
from torchrl_lang.recipes.comparison.players import CHOICE, REPORT, Played, TrainedPlayer

__all__ = ["CHOICE", "REPORT", "ComparisonOptions", "Played", "TrainedPlayer"]
