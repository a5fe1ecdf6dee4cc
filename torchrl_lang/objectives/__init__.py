"""Losses over rows: each reads whole episodes, one a row, and returns terms named ``loss_*``."""

from torchrl_lang.objectives.agilerl import agilerl_loss
from torchrl_lang.objectives.archer import ArCHerLoss
from torchrl_lang.objectives.bc import BCLoss
from torchrl_lang.objectives.bcq import BCQLoss
from torchrl_lang.objectives.chai import CHAILoss
from torchrl_lang.objectives.cql import CQLLoss
from torchrl_lang.objectives.decision_transformer import DecisionTransformerLoss
from torchrl_lang.objectives.ilql import ILQLLoss
from torchrl_lang.objectives.oreo import OREOLoss
from torchrl_lang.objectives.ppo import PPOLoss
from torchrl_lang.objectives.preference import DPOLoss, IPOLoss, KTOLoss
from torchrl_lang.objectives.psi import PsiLoss
from torchrl_lang.objectives.qsft import QSFTLoss
from torchrl_lang.objectives.utterance_ilql import UtteranceILQLLoss

__all__ = [
    "ArCHerLoss",
    "BCLoss",
    "BCQLoss",
    "CHAILoss",
    "CQLLoss",
    "DPOLoss",
    "DecisionTransformerLoss",
    "ILQLLoss",
    "IPOLoss",
    "KTOLoss",
    "OREOLoss",
    "PPOLoss",
    "PsiLoss",
    "QSFTLoss",
    "UtteranceILQLLoss",
    "agilerl_loss",
]
