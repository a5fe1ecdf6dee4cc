"""Algorithm distillation (arXiv 2210.14215): learning histories, and models that improve in their context."""

from torchrl_lang.algorithm_distillation.ad_loss import ADLoss
from torchrl_lang.algorithm_distillation.ad_saving import load_ad_model, save_ad_model
from torchrl_lang.algorithm_distillation.ad_transformer import ADTransformer
from torchrl_lang.algorithm_distillation.context_policy import (
    ContextPolicy,
    OptimalPolicy,
    PromptablePolicy,
    RandomPolicy,
)
from torchrl_lang.algorithm_distillation.history import LearningHistory, load_history
from torchrl_lang.algorithm_distillation.history_actor import HistoryActor, PromptedPolicy
from torchrl_lang.algorithm_distillation.history_windows import HistoryWindows
from torchrl_lang.algorithm_distillation.history_writer import HistoryWriter, record_history
from torchrl_lang.algorithm_distillation.in_context import episode_returns, evaluate_in_context
from torchrl_lang.algorithm_distillation.in_context_report import (
    InContextReport,
    TaskResult,
    bootstrap_band,
    in_context_report,
)
from torchrl_lang.algorithm_distillation.paired_test import PairedTest, paired_test
from torchrl_lang.algorithm_distillation.run_format import RunRecord
from torchrl_lang.algorithm_distillation.run_recorder import RunRecorder, read_run, run_records
from torchrl_lang.algorithm_distillation.step_entries import Continuous, Discrete, entry_of_spec
from torchrl_lang.algorithm_distillation.task_split import TaskSplit, split_tasks

__all__ = [
    "ADLoss",
    "ADTransformer",
    "ContextPolicy",
    "Continuous",
    "Discrete",
    "HistoryActor",
    "HistoryWindows",
    "HistoryWriter",
    "InContextReport",
    "LearningHistory",
    "OptimalPolicy",
    "PairedTest",
    "PromptablePolicy",
    "PromptedPolicy",
    "RandomPolicy",
    "TaskResult",
    "RunRecord",
    "RunRecorder",
    "TaskSplit",
    "bootstrap_band",
    "entry_of_spec",
    "episode_returns",
    "evaluate_in_context",
    "in_context_report",
    "load_ad_model",
    "load_history",
    "paired_test",
    "record_history",
    "save_ad_model",
    "read_run",
    "run_records",
    "split_tasks",
]
