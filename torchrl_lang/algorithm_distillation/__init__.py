"""Algorithm distillation (arXiv 2210.14215): learning histories, and models that improve in their context."""

from torchrl_lang.algorithm_distillation.actor import HistoryActor
from torchrl_lang.algorithm_distillation.entries import Continuous, Discrete
from torchrl_lang.algorithm_distillation.history import LearningHistory, load_history
from torchrl_lang.algorithm_distillation.history_writer import HistoryWriter, record_history
from torchrl_lang.algorithm_distillation.in_context import episode_returns, evaluate_in_context
from torchrl_lang.algorithm_distillation.loss import ADLoss
from torchrl_lang.algorithm_distillation.model import ADTransformer, load_ad_model, save_ad_model
from torchrl_lang.algorithm_distillation.policies import ContextPolicy, OptimalPolicy, PromptedPolicy, RandomPolicy
from torchrl_lang.algorithm_distillation.report import in_context_report, paired_test
from torchrl_lang.algorithm_distillation.windows import HistoryWindows, split_tasks

__all__ = [
    "ADLoss",
    "ADTransformer",
    "ContextPolicy",
    "Continuous",
    "Discrete",
    "HistoryActor",
    "HistoryWindows",
    "HistoryWriter",
    "LearningHistory",
    "OptimalPolicy",
    "PromptedPolicy",
    "RandomPolicy",
    "episode_returns",
    "evaluate_in_context",
    "in_context_report",
    "load_ad_model",
    "load_history",
    "paired_test",
    "record_history",
    "save_ad_model",
    "split_tasks",
]
