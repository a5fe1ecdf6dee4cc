"""The training loop, optimizers, a curriculum, checkpoints and logs."""

from torchrl_lang.training.averaging import WeightAverage
from torchrl_lang.training.checkpoint import Checkpointer
from torchrl_lang.training.curriculum import Curriculum
from torchrl_lang.training.logging import RunLog
from torchrl_lang.training.loop import total_loss, train_steps
from torchrl_lang.training.metrics import FiniteCheck, NonFiniteError
from torchrl_lang.training.optim import adamw, muon_adamw, warmup_cosine
from torchrl_lang.training.state import RandomState
from torchrl_lang.training.torchrl_trainer import EpisodeRowsHook, OfflineCollector

__all__ = [
    "Checkpointer",
    "Curriculum",
    "EpisodeRowsHook",
    "FiniteCheck",
    "NonFiniteError",
    "OfflineCollector",
    "RandomState",
    "RunLog",
    "WeightAverage",
    "adamw",
    "muon_adamw",
    "total_loss",
    "train_steps",
    "warmup_cosine",
]
