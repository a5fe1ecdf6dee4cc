"""What the offline recipes with learned action values share: options, the model's folder, and training without a V."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import (
    SavedModel,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    default_qvalue_head,
    qvalue_module,
    save_language_model,
)
from torchrl_lang.modules.heads import ActionValueHead
from torchrl_lang.modules.saved_heads import Head
from torchrl_lang.objectives.values import QValueLoss
from torchrl_lang.recipes.algorithms import ActionValueOptions
from torchrl_lang.recipes.offline import OfflineData, build_actor, train_offline
from torchrl_lang.recipes.run_policy import RunDecoding
from torchrl_lang.recipes.saved_qvalues import saved_qvalues
from torchrl_lang.recipes.start_model import build_model
from torchrl_lang.text import Tokenizer

__all__ = ["ActionValueOptions", "save_model", "train_action_values"]


def save_model(
    folder: Path,
    model: SavedModel,
    loss: QValueLoss,
    qvalue: ActionValueHead,
    tokenizer: Tokenizer,
    **heads: ValueHead,
) -> None:
    """Save the model that was trained with its heads, ``target_qvalue``, ``qvalue`` and further ones."""
    learned = saved_qvalues("qvalue", qvalue, default_qvalue_head(model.lm), loss)
    named: dict[str, Head] = {**learned, **heads, **model.heads}
    save_language_model(folder, model.lm, named, tokenizer=tokenizer.config())


def train_action_values(
    options: ActionValueOptions,
    data: OfflineData,
    kind: type[QValueLoss],
    *,
    terms: Mapping[str, Any],
    guidance: Mapping[str, Any],
    **decoding: Any,
) -> float:
    """Train a loss without a V; returns the best mean return, see :func:`train_offline`.

    Args:
        options: of the recipe.
        data: episodes to learn from, and the evaluation.
        kind: class of the loss.
        terms: its own options.
        guidance: options of the :class:`~torchrl_lang.modules.ValueGuidance` of the policy that is evaluated.
        **decoding: options of that policy.
    """
    evaluation, tokenizer = data.evaluation, data.dataset.tokenizer
    torch.manual_seed(options.seed)
    model = build_model(options, data)
    actor, qvalue = build_actor(options, model), default_qvalue_head(model.lm)
    make_policy = partial(UtteranceActor, actor, tokenizer.control, evaluation.action_length)
    loss = kind(
        make_policy(),  # with it no target is the value of a token that cannot be written
        qvalue_module(qvalue),
        gamma=options.gamma,
        turn_gamma=options.turn_gamma,
        qvalue_weight=options.qvalue_weight,
        transition_weight=options.transition_weight,
        actor_normalizer="action",
        **terms,
    )

    def save(folder: Path) -> None:
        save_model(folder, model, loss, qvalue, tokenizer)
        RunDecoding(guidance.get("include_logits", True), decoding.get("min_p")).save(options.out)

    best = train_offline(
        options,
        data,
        loss,
        make_policy(guidance=ValueGuidance(loss.target_qvalue_network(), **guidance), **decoding),
        save=save,
        check=lambda rows: {"held_out_loss": imitation_loss(actor, rows)},
        target_updater=SoftUpdate(loss, tau=options.tau),
    )
    print(evaluation.next_steps(options.out), end="", flush=True)
    return best
