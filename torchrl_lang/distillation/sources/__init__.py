"""Source algorithms: what learns, or seems to learn, over the histories that a model is trained on."""

from torchrl_lang.distillation.sources.base import HistorySource
from torchrl_lang.distillation.sources.exploration import SLOW_DECAY, LinearDecay, epsilon_greedy
from torchrl_lang.distillation.sources.noisy_expert import NoisyExpert
from torchrl_lang.distillation.sources.q_learning import QLearning
from torchrl_lang.distillation.sources.ucb import UCB

__all__ = ["HistorySource", "LinearDecay", "NoisyExpert", "QLearning", "SLOW_DECAY", "UCB", "epsilon_greedy"]
