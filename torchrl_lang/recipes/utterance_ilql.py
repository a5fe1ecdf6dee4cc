"""ILQL over utterances: learn the value of each utterance from a fixed dataset, and play the best of some samples."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from torchrl.objectives import SoftUpdate

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import (
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueHead,
    qvalue_module,
    save_language_model,
    value_module,
)
from torchrl_lang.objectives import UtteranceILQLLoss
from torchrl_lang.recipes.algorithms import UtteranceILQL
from torchrl_lang.recipes.offline import build_actor, open_data, train_offline
from torchrl_lang.recipes.run_policy import RunDecoding
from torchrl_lang.recipes.saved_qvalues import saved_qvalues
from torchrl_lang.recipes.start_model import build_model

__all__ = ["UtteranceILQL", "main"]


def main(options: UtteranceILQL) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    data = open_data(options)
    torch.manual_seed(options.seed)
    tokenizer = data.dataset.tokenizer
    model = build_model(options, data)
    lm = model.lm
    width = lm.config.hidden_size
    qvalue, value = UtteranceQValueHead(width).to(lm.device), ValueHead(width).to(lm.device)
    loss = UtteranceILQLLoss(
        build_actor(options, model),
        qvalue_module(qvalue),
        value_module(value),
        gamma=options.gamma,
        expectile=options.expectile,
        value_weight=options.value_weight,
        qvalue_weight=options.qvalue_weight,
        transition_weight=options.transition_weight,
        end_of_action=tokenizer.control.end_of_action,
        actor_normalizer="action",
    )
    policy = UtteranceActor(
        loss.actor_network,
        tokenizer.control,
        data.evaluation.action_length,
        guidance=UtteranceValueGuidance(loss.target_qvalue_network()),
        method="best_of",
        candidates=options.candidates,
        end_value_weight=1.0,
        log_prob_weight=options.log_prob_weight,
    )

    def save(folder: Path) -> None:
        qvalues = saved_qvalues("utterance_qvalue", qvalue, deepcopy(qvalue), loss)
        save_language_model(folder, lm, {**qvalues, "value": value, **model.heads}, tokenizer=tokenizer.config())
        RunDecoding(log_prob_weight=options.log_prob_weight).save(options.out)

    best = train_offline(
        options,
        data,
        loss,
        policy,
        save,
        check=lambda rows: {"held_out_loss": imitation_loss(loss.actor_network, rows)},
        target_updater=SoftUpdate(loss, tau=options.tau),
    )
    print(data.evaluation.next_steps(options.out), end="", flush=True)
    return best
