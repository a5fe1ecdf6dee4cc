"""The training loop, optimizers, checkpoints, logs and a progress bar."""

from torchrl_lang.training.averaging import WeightAverage
from torchrl_lang.training.checkpoint import Checkpointer, Stateful
from torchrl_lang.training.logging import LOGGERS, RunLog, make_log
from torchrl_lang.training.loop import total_loss, train_steps
from torchrl_lang.training.metrics import FiniteCheck, NonFiniteError, Scalar, check_parameters, to_scalars
from torchrl_lang.training.optim import MuonAdamW, adamw, muon_adamw, warmup_cosine
from torchrl_lang.training.progress import Progress
from torchrl_lang.training.state import CheckpointError, RandomState, join_state, split_state
from torchrl_lang.training.torchrl_trainer import EpisodeRowsHook, OfflineCollector

__all__ = [
    "LOGGERS",
    "CheckpointError",
    "Checkpointer",
    "EpisodeRowsHook",
    "FiniteCheck",
    "MuonAdamW",
    "NonFiniteError",
    "OfflineCollector",
    "Progress",
    "RandomState",
    "RunLog",
    "Scalar",
    "Stateful",
    "WeightAverage",
    "adamw",
    "check_parameters",
    "join_state",
    "make_log",
    "muon_adamw",
    "split_state",
    "to_scalars",
    "total_loss",
    "train_steps",
    "warmup_cosine",
]
