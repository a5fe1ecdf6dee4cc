"""OREO: learn a policy and its values from how consistent they are on the paths of a fixed dataset."""

from __future__ import annotations

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import UtteranceActor, ValueHead, save_language_model, value_module
from torchrl_lang.modules.saved_heads import Head
from torchrl_lang.objectives import OREOLoss
from torchrl_lang.recipes.algorithms import OREO
from torchrl_lang.recipes.offline import open_data, train_offline
from torchrl_lang.recipes.reference import start_with_reference

__all__ = ["OREO", "main"]


def main(options: OREO) -> float:
    """Train; returns the best mean return, see :func:`train_offline`.

    Raises:
        ValueError: there is no model to start from.
    """
    data = open_data(options)
    model, actor, policy, reference = start_with_reference(options, data)
    tokenizer, value = data.dataset.tokenizer, ValueHead(model.lm.config.hidden_size).to(model.lm.device)
    loss = OREOLoss(
        policy,
        value_module(value),
        reference,
        beta=options.reward_scale,
        kl_weight=options.kl_weight,
        value_weight=options.value_weight,
        level=options.level,
        transition_weight=options.transition_weight,
        actor_normalizer="action",
    )
    heads: dict[str, Head] = {"value": value, **model.heads}
    best = train_offline(
        options,
        data,
        loss,
        UtteranceActor(actor, tokenizer.control, data.evaluation.action_length, method="greedy"),
        save=lambda folder: save_language_model(folder, model.lm, heads, tokenizer=tokenizer.config()),
        check=lambda rows: {"held_out_loss": imitation_loss(actor, rows)},
    )
    print(data.evaluation.next_steps(options.out), end="", flush=True)
    return best
