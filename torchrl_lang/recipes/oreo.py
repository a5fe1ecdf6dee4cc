"""OREO: learn a policy and its values from how consistent they are on the paths of a fixed dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.functional.returns import PathLevel
from torchrl_lang.modules import UtteranceActor, ValueHead, save_language_model, value_module
from torchrl_lang.modules.saved_heads import Head
from torchrl_lang.objectives import OREOLoss
from torchrl_lang.recipes.offline import OfflineOptions, open_data, train_offline
from torchrl_lang.recipes.options import option
from torchrl_lang.recipes.reference import start_with_reference

__all__ = ["OREO", "main"]


@dataclass(frozen=True, kw_only=True)
class OREO(OfflineOptions):
    """OREO on a dataset (arXiv 2412.16145): path consistency of a policy and its values; needs --start."""

    preset: ClassVar[str] = "ilql"
    defining: ClassVar[tuple[str, ...]] = ("value_weight",)

    reward_scale: float = option(
        0.1, "reward that is worth one nat of divergence from the reference, the paper's beta", above=0
    )
    kl_weight: float = option(
        0.3,
        "weight of the divergence from the reference, the paper's alpha (0.01 there): keeps tokens without data rare",
        at_least=0,
    )
    value_weight: float = option(1.0, "weight of V's loss; the policy's has weight 1", at_least=0)
    level: PathLevel = option("token", "what an action is: a token, an utterance, or all of a row")


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
