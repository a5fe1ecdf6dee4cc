"""What the recipes share whose policy is measured against the one that it starts from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict.nn import ProbabilisticTensorDictSequential

from torchrl_lang.modules import SavedModel, UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.modules.save import saved_actor
from torchrl_lang.recipes.offline import OfflineData, OfflineOptions, build_actor
from torchrl_lang.recipes.start_model import build_model
from torchrl_lang.transforms import frozen_copy

__all__ = ["WithReference", "start_with_reference"]


class WithReference(NamedTuple):
    """A model at the beginning of training, and a frozen copy of it."""

    model: SavedModel
    actor: ProbabilisticTensorDictSequential
    policy: UtteranceActor
    """Over the actor, which is trained."""
    reference: FrozenActor
    """An utterance actor like the policy, which shares the weights that do not train."""


def start_with_reference(options: OfflineOptions, data: OfflineData) -> WithReference:
    """Seed everything, and load the model to start from.

    Raises:
        ValueError: there is none, or it has other tokens than the data, or does not read their features.
    """
    if options.start is None and options.pretrained is None:
        raise ValueError(
            f"{type(options).__name__} starts from a policy that imitates the data, which is its reference as well: "
            "give a finished run of BC with --start RUN."
        )
    torch.manual_seed(options.seed)
    model = build_model(options, data, as_it_is=True)
    actor, control, length = build_actor(options, model), data.dataset.tokenizer.control, data.evaluation.action_length
    reference = frozen_copy(UtteranceActor(saved_actor(model), control, length))
    return WithReference(model, actor, UtteranceActor(actor, control, length), reference)
