"""Source algorithms: what learns, or seems to learn, over the histories that a model is trained on."""

from torchrl_lang.algorithm_distillation.sources.base import HistorySource
from torchrl_lang.algorithm_distillation.sources.dqn import DQN
from torchrl_lang.algorithm_distillation.sources.exploration import NO_NOISE, SLOW_DECAY, LinearDecay, epsilon_greedy
from torchrl_lang.algorithm_distillation.sources.gym_source import GymSource
from torchrl_lang.algorithm_distillation.sources.gym_tasks import GymTask, cart_pole
from torchrl_lang.algorithm_distillation.sources.noisy_expert import NoisyExpert
from torchrl_lang.algorithm_distillation.sources.posterior_sampling import PosteriorSampling
from torchrl_lang.algorithm_distillation.sources.ppo import PPO
from torchrl_lang.algorithm_distillation.sources.q_learning import QLearning
from torchrl_lang.algorithm_distillation.sources.tabular import TabularSource
from torchrl_lang.algorithm_distillation.sources.ucb import UCB

__all__ = [
    "DQN",
    "GymSource",
    "GymTask",
    "HistorySource",
    "LinearDecay",
    "NO_NOISE",
    "NoisyExpert",
    "PPO",
    "PosteriorSampling",
    "QLearning",
    "SLOW_DECAY",
    "TabularSource",
    "UCB",
    "cart_pole",
    "epsilon_greedy",
]
