"""Algorithm distillation (arXiv 2210.14215): learning histories, and models that improve in their context."""

from torchrl_lang.distillation.history import LearningHistory, load_history
from torchrl_lang.distillation.history_windows import HistoryWindows
from torchrl_lang.distillation.history_writer import HistoryWriter, record_history
from torchrl_lang.distillation.task_split import TaskSplit, split_tasks

__all__ = [
    "HistoryWindows",
    "HistoryWriter",
    "LearningHistory",
    "TaskSplit",
    "load_history",
    "record_history",
    "split_tasks",
]
