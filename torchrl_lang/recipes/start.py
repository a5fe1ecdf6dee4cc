"""Where an online run starts: the model of a finished run, what of it trains, and what it is kept near."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrl_lang.data import Tokenizer
from torchrl_lang.modules import UtteranceActor, ValueHead, language_actor, save_language_model, train_top_layers
from torchrl_lang.recipes.tasks import Task
from torchrl_lang.recipes.trained import load_run
from torchrl_lang.transforms import RowReference, adapters_off, frozen_copy

__all__ = ["Start", "load_start"]


@dataclass(frozen=True)
class Start:
    """A model that is about to be trained online."""

    task: Task
    tokenizer: Tokenizer
    lm: Any
    """The Hugging Face model, or PEFT's around it."""
    value: ValueHead
    policy: UtteranceActor
    """Acts, and is trained; with the values of its states."""
    reference: RowReference
    """The start, frozen: what it needs beside the policy's own weights."""

    def save(self, folder: Path) -> Path:
        """Write the model as it is now; adapters are merged in what is written."""
        return save_language_model(folder, self.lm, {"value": self.value}, tokenizer=self.tokenizer.config())


def load_start(
    folder: Path,
    device: torch.device,
    *,
    lora_rank: int | None = None,
    top_layers: int | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
) -> Start:
    """Take the model of the run in ``folder``.

    Args:
        folder: of a finished run.
        device: where to compute.
        lora_rank: train low-rank adapters (LoRA, arXiv 2106.09685) of this rank beside the frozen weights. Without them
            the model is the reference.
        top_layers: train only so many of the last transformer blocks. The reference shares the others.
        temperature: of the logits, for acting and for learning.
        seed: of the policy's words; without one each copy of the policy takes a fresh seed.

    Raises:
        FileNotFoundError: there is no finished run.
        ValueError: both ``lora_rank`` and ``top_layers`` came.
        ImportError: adapters are asked for and PEFT is not installed.
    """
    if lora_rank is not None and top_layers is not None:
        raise ValueError(f"Train adapters or the top layers: got lora_rank={lora_rank} and top_layers={top_layers}.")
    run = load_run(folder)
    lm: Any = run.model.lm.to(device)
    if lora_rank is not None:
        lm = _with_adapters(lm, lora_rank)
    actor = language_actor(lm)
    if top_layers is not None:
        train_top_layers(actor, top_layers)
    value = run.model.heads.get("value")
    value = value if isinstance(value, ValueHead) else ValueHead(lm.config.hidden_size)
    value = value.to(device)
    speak = partial(
        UtteranceActor,
        actor,
        run.tokenizer.control,
        run.task.action_length,
        temperature=temperature,
    )
    reference = RowReference(frozen_copy(speak()) if lora_rank is None else adapters_off(speak()))
    return Start(run.task, run.tokenizer, lm, value, speak(value=value, seed=seed), reference)


def _with_adapters(lm: Any, rank: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora_rank needs PEFT: pip install 'torchrl-lang[peft]'.") from error
    return get_peft_model(lm, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
