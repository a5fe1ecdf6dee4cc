"""Compute the reward caches of a file of visual dialogues."""

from __future__ import annotations

from torchrl_lang._files import folder_lock
from torchrl_lang.envs.visual_dialogue import DialogueModels, RemoteModels, VisualDialogues
from torchrl_lang.envs.visual_dialogue.prepare import local_models
from torchrl_lang.envs.visual_dialogue.scoring import write_reward_caches
from torchrl_lang.recipes.tasks.visual_dialogue import VisualDialogueRewards

__all__ = ["VisualDialogueRewards", "main"]


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
