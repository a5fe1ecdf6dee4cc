"""Losses over rows: each reads whole episodes, one a row, and returns terms named ``loss_*``."""

from torchrl_lang.objectives.bc import BCLoss
from torchrl_lang.objectives.chai import CHAILoss
from torchrl_lang.objectives.ilql import ILQLLoss
from torchrl_lang.objectives.ppo import PPOLoss
from torchrl_lang.objectives.utterance_ilql import UtteranceILQLLoss

__all__ = ["BCLoss", "CHAILoss", "ILQLLoss", "PPOLoss", "UtteranceILQLLoss"]
