"""Algorithm distillation (arXiv 2210.14215): learning histories, and models that improve in their context."""

from torchrl_lang.distillation.history import LearningHistory, load_history
from torchrl_lang.distillation.history_windows import HistoryWindows
from torchrl_lang.distillation.history_writer import HistoryWriter, record_history
from torchrl_lang.distillation.run_format import RunRecord
from torchrl_lang.distillation.run_recorder import RunRecorder, read_run, run_records
from torchrl_lang.distillation.task_split import TaskSplit, split_tasks

__all__ = [
    "HistoryWindows",
    "HistoryWriter",
    "LearningHistory",
    "RunRecord",
    "RunRecorder",
    "TaskSplit",
    "load_history",
    "read_run",
    "record_history",
    "run_records",
    "split_tasks",
]
