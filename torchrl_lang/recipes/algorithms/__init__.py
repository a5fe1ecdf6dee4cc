"""The algorithms of ``train``: their options and where each is run. Nothing here imports torch."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torchrl_lang.recipes.algorithms.offline import (
    AWAC,
    BC,
    BCQ,
    CHAI,
    CQL,
    DPO,
    DT,
    ILQL,
    IPO,
    KTO,
    OREO,
    QSFT,
    MonteCarlo,
    PaperILQL,
    PercentBC,
    Psi,
    SingleStep,
    UtteranceILQL,
)
from torchrl_lang.recipes.algorithms.online import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    ArCHer,
    DrGRPO,
    GiGPO,
    ReinforcePlusPlus,
    Rejection,
    TurnPPO,
)
from torchrl_lang.recipes.algorithms.training import RunOptions, TrainingOptions
from torchrl_lang.recipes.options import Options

_OF_TOKENS = (ILQL, SingleStep, MonteCarlo, AWAC, PaperILQL, CQL, Psi, BCQ, QSFT, OREO)
_OTHERS = (DPO, IPO, KTO, CHAI, UtteranceILQL, PPO, Rejection, ArCHer)
_RATIOS = (TurnPPO, GRPO, DrGRPO, RLOO, ReinforcePlusPlus, DAPO, GSPO, CISPO, GiGPO)
ALGORITHMS: dict[str, type[TrainingOptions]] = {
    kind.algorithm: kind for kind in (BC, PercentBC, DT, *_OF_TOKENS, *_OTHERS, *_RATIOS)
}
"""The algorithms of ``train`` by name."""


def together(options: Options) -> AbstractContextManager[None]:
    """Where ``torchrun`` has started this process, a context in which it trains together with the others.

    Raises:
        ValueError: the options are of a command that works alone, or the batches are too small to be shared out.
    """
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    if alone and isinstance(options, RunOptions) and options.shard:
        raise ValueError("--shard shares weights out to the processes of torchrun: start the command with torchrun.")
    if alone or "RANK" not in os.environ:
        return nullcontext()
    from torchrl_lang import _ranks  # it imports torch

    number = os.environ["WORLD_SIZE"]
    if not isinstance(options, RunOptions):
        raise ValueError(f"Only the training of language models runs in {number} processes: leave out torchrun.")
    if options.batch_size < int(number):
        raise ValueError(f"--batch-size {options.batch_size} is fewer than one for each of {number} processes.")
    if getattr(options, "collector", None) == "ray":
        raise ValueError("--collector ray plays for one learner: leave it out, or torchrun.")
    _ranks.choose_gpu()
    return _ranks.joined(options.torch_device())


def train(options: TrainingOptions, **opened: Any) -> float:
    """Train with the options of an algorithm; returns the figure that chose the checkpoint, mostly the mean return.

    Args:
        options: of the algorithm.
        **opened: of BC and ILQL ``data``, an :class:`~torchrl_lang.recipes.offline.OfflineData`.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.algorithms import BC, train
        >>> options = BC(data=Path("runs/data"), out=Path("runs/bc"), steps=100)
        >>> train(options)
        Traceback (most recent call last):
            ...
        FileNotFoundError: There is no dataset in runs/data...
    """
    module, _, name = options.place.partition(":")
    with together(options):
        return getattr(importlib.import_module(f"torchrl_lang.recipes.{module}"), name)(options, **opened)
