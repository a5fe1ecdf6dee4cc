"""Q-SFT: train a language model's token probabilities to be action values, and let them guide the one it began as."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from torchrl_lang.functional import decision_mask, returns_to_go, shift_left, turn_end_mask
from torchrl_lang.modules import LikelihoodGuidance, UtteranceActor, save_language_model
from torchrl_lang.modules.save import FEATURES_HEAD, VALUE_FEATURES_HEAD, language_model_of
from torchrl_lang.objectives import QSFTLoss
from torchrl_lang.recipes.algorithms import QSFT
from torchrl_lang.recipes.offline import open_data, train_offline
from torchrl_lang.recipes.reference import start_with_reference
from torchrl_lang.recipes.run_policy import RunDecoding
from torchrl_lang.text import Tokenizer

__all__ = ["QSFT", "main", "return_range"]


def return_range(rows: TensorDictBase, tokenizer: Tokenizer, gamma: float, turn_gamma: float) -> tuple[float, float]:
    """The least and the greatest discounted return to go of a decision, of rows ``[N, T]``."""
    lows, highs = [], []
    for part in rows.split(10_000):
        tokens, attention, action = (part.get(key) for key in ("tokens", "attention_mask", "agent_mask"))
        decision = decision_mask(action)
        ends = turn_end_mask(attention, action, tokens, tokenizer.control.end_of_action)
        discount = torch.where(ends, turn_gamma, gamma)
        found = returns_to_go(shift_left(part.get("token_reward")), decision, discount)[decision]
        lows.append(float(found.amin()))
        highs.append(float(found.amax()))
    return min(lows), max(highs)


def main(options: QSFT) -> float:
    """Train; returns the best mean return, see :func:`train_offline`.

    Raises:
        ValueError: there is no model to start from, or all returns are equal.
    """
    data = open_data(options)
    tokenizer, evaluation = data.dataset.tokenizer, data.evaluation
    least, greatest = return_range(data.dataset.rows, tokenizer, options.gamma, options.turn_gamma)
    model, actor, policy, reference = start_with_reference(options, data)
    loss = QSFTLoss(
        policy,
        reference,
        gamma=options.gamma,
        turn_gamma=options.turn_gamma,
        value_min=least if options.value_min is None else options.value_min,
        value_max=greatest if options.value_max is None else options.value_max,
        threshold=options.threshold,
        rest=tokenizer.control.pad if options.rest == "padding" else None,
        transition_weight=options.transition_weight,
        actor_normalizer="action",
    )
    imitates = reference.actor.decoder.actor
    decoding = RunDecoding(min_p=options.threshold or None, likelihood_ratio=options.guide == "ratio")

    def save(folder: Path) -> None:
        decoding.save(options.out)
        learned = model.heads.get(FEATURES_HEAD)
        heads = {} if learned is None else {FEATURES_HEAD: imitates[0].module.features, VALUE_FEATURES_HEAD: learned}
        begun = language_model_of(imitates)
        save_language_model(folder, begun, heads, tokenizer=tokenizer.config(), value_lm=model.lm)

    @torch.no_grad()
    def check(rows: TensorDictBase) -> dict[str, float]:
        out = loss(rows)
        return {"held_out_value_loss": float(out["loss_qvalue"]), "held_out_likelihood": float(out["likelihood"])}

    guidance = LikelihoodGuidance(actor, beta=options.beta, ratio=decoding.likelihood_ratio)
    guided = UtteranceActor(
        imitates,
        tokenizer.control,
        evaluation.action_length,
        guidance=guidance,
        method="greedy",
        min_p=decoding.min_p if decoding.likelihood_ratio else None,
    )
    best = train_offline(options, data, loss, guided, save, check, target_updater=SoftUpdate(loss, tau=options.tau))
    print(evaluation.next_steps(options.out), end="", flush=True)
    return best
