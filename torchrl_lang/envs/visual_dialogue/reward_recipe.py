"""Compute the reward caches of a file of visual dialogues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang._files import folder_lock
from torchrl_lang.envs.visual_dialogue import DialogueModels, RemoteModels, VisualDialogues, write_reward_caches
from torchrl_lang.envs.visual_dialogue.folder import local_models
from torchrl_lang.recipes.options import Options, option, required

__all__ = ["VisualDialogueRewards", "main"]


@dataclass(frozen=True, kw_only=True)
class VisualDialogueRewards(Options):
    """Compute both reward caches of a split: initial values and the reward of every round."""

    dialogues: Path = required("JSON file of the dialogues")
    features: Path = required("file of the image features: HDF5, or .npy")
    split: Literal["train", "val", "test"] = required("the split")
    out: Path = required("folder for the caches; the same command continues after an interruption")
    server: str | None = option(None, "address of a server of the models")
    models: Path | None = option(
        None, "folder of trained models, instead of a server; they rank among the images of the split"
    )
    batch_size: int = option(16, "dialogues at a time", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.server is None) == (self.models is None):
            raise ValueError("Give either --server or --models.")


def main(options: VisualDialogueRewards) -> None:
    """Compute and save the caches."""
    data = VisualDialogues(options.dialogues, options.features, options.split)
    with folder_lock(options.out, "computes rewards"):
        write_reward_caches(
            _models(options),
            data.dialogues,
            data.features.rows,
            options.out,
            options.split,
            batch_size=options.batch_size,
            on_batch=lambda done: print(f"{done} of {len(data)} dialogues", flush=True),
        )
    print(f"wrote the reward caches of {len(data)} dialogues to {options.out}")


def _models(options: VisualDialogueRewards) -> DialogueModels:
    if options.models is not None:
        return local_models(options.models, options.features, options.split)
    assert options.server is not None  # checked by the options
    return RemoteModels(options.server)
