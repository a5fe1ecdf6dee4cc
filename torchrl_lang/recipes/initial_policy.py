"""Load the initial policy of an online run: a finished run's model, its trainable part and its frozen reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrl_lang.modules import SavedModel, UtteranceActor, ValueHead, save_language_model, train_top_layers
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.save import FEATURES_HEAD, saved_actor
from torchrl_lang.modules.saved_heads import Head
from torchrl_lang.recipes.algorithms import OnlineOptions
from torchrl_lang.recipes.datasets import check_features
from torchrl_lang.recipes.load_run import FinishedRun, load_run, refuse_returns
from torchrl_lang.recipes.tasks.base import Task
from torchrl_lang.text import Tokenizer
from torchrl_lang.transforms import adapters_off, frozen_copy

__all__ = ["InitialPolicy", "load_initial_policy"]


@dataclass(frozen=True)
class InitialPolicy:
    """A model at the beginning of online training."""

    task: Task
    tokenizer: Tokenizer
    lm: Any
    """The Hugging Face model, or PEFT's wrapper of it."""
    value: ValueHead
    projector: Mapping[str, Head]
    """Its projector of features as a head, if it has one."""
    policy: UtteranceActor
    """Acts and is trained; it also writes state values."""
    reference: FrozenActor
    """The initial policy, frozen. It shares the frozen weights with the policy."""

    def save(self, folder: Path) -> Path:
        """Save the current model, with adapters merged."""
        return save_language_model(
            folder, self.lm, {"value": self.value, **self.projector}, tokenizer=self.tokenizer.config()
        )


def load_initial_policy(options: OnlineOptions) -> InitialPolicy:
    """Seed everything and load the model of the run in ``options.start``.

    ``lora_rank`` adds low-rank adapters (LoRA, arXiv 2106.09685) to frozen weights, and the reference is the model
    without them. ``top_layers`` trains only the last blocks, and the reference shares the others. A projector of
    features trains with the model, but not beside adapters. Policies in worker processes each draw a random seed.

    Raises:
        ValueError: options contradict each other, the run is a decision transformer, or it does not read the features
            that the games show.
    """
    rank, top_layers = options.lora_rank, options.top_layers
    torch.manual_seed(options.seed)
    run, device = load_run(options.start, options.given_task()), options.torch_device()
    refuse_returns(options.start, run.model)
    _check_features(options.start, run)
    lm: Any = run.model.lm.to(device)
    if rank is not None:
        lm = _with_adapters(lm, rank)
    projector = {name: head for name, head in run.model.heads.items() if name == FEATURES_HEAD}
    actor = saved_actor(SavedModel(lm, projector, None))
    if rank is not None and FEATURES_HEAD in projector:
        projector[FEATURES_HEAD].requires_grad_(False)  # the reference is the same actor without its adapters
    if top_layers is not None:
        train_top_layers(actor, top_layers)
    value = run.model.heads.get("value")
    value = (value if isinstance(value, ValueHead) else ValueHead(lm.config.hidden_size)).to(device)
    make_policy = partial(
        UtteranceActor, actor, run.tokenizer.control, run.task.action_length, temperature=options.temperature
    )
    policy = make_policy(value=value, seed=options.seed if options.collector == "single" else None)
    reference = frozen_copy(make_policy()) if rank is None else adapters_off(make_policy())
    return InitialPolicy(run.task, run.tokenizer, lm, value, projector, policy, reference)


def _check_features(folder: Path, run: FinishedRun) -> None:
    """Raise ValueError unless a run reads the features that its games show."""
    embedding: Any = run.model.heads.get(FEATURES_HEAD)
    if embedding is not None:
        check_features(run.task, embedding.features, folder)
    elif run.task.features() is not None:
        raise ValueError(
            f"The games show features, which the policy of {folder} does not read: generate a dataset of the games, "
            f"train BC on it (with --start {folder} to keep the model), and start from that run."
        )


def _with_adapters(lm: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("--lora-rank needs PEFT: pip install 'torchrl-lang[peft]'.") from error
    return get_peft_model(lm, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
