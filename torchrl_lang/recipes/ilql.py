"""ILQL: learn the value of each token from a fixed dataset, and decode guided by these values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from torchrl_lang._files import write_file
from torchrl_lang.evaluation import ValueReport, imitation_loss, value_report
from torchrl_lang.modules import (
    SavedModel,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    default_qvalue_head,
    qvalue_module,
    value_module,
)
from torchrl_lang.modules.heads import ActionValueHead
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.recipes.action_values import save_model
from torchrl_lang.recipes.algorithms import ILQL
from torchrl_lang.recipes.offline import build_actor, held_out_rows, open_data, train_offline
from torchrl_lang.recipes.run_policy import RunDecoding
from torchrl_lang.recipes.start_model import build_model

__all__ = ["ILQL", "build_loss", "main"]


def build_loss(options: ILQL, model: SavedModel, end_of_action: int) -> tuple[ILQLLoss, ActionValueHead, ValueHead]:
    """The loss, and the heads that it trains beside the language model."""
    lm = model.lm
    qvalue, value = default_qvalue_head(lm), ValueHead(lm.config.hidden_size).to(lm.device)
    loss = ILQLLoss(
        build_actor(options, model),
        qvalue_module(qvalue),
        value_module(value),
        gamma=options.gamma,
        turn_gamma=options.turn_gamma,
        expectile=options.expectile,
        value_weight=options.value_weight,
        qvalue_weight=options.qvalue_weight,
        advantage_temperature=options.advantage_temperature,
        weight_clip=options.weight_clip,
        cql_weight=options.cql_weight,
        target=options.target,
        lmbda=options.lmbda,
        turn_lmbda=options.turn_lmbda,
        qvalue_lmbda=options.qvalue_lmbda,
        end_of_action=end_of_action,
        transition_weight=options.transition_weight,
        actor_normalizer=options.actor_normalizer,
    )
    return loss, qvalue, value


def main(options: ILQL) -> float:
    """Train; returns the best mean return, see :func:`train_offline`."""
    data = open_data(options)
    dataset, evaluation = data.dataset, data.evaluation
    torch.manual_seed(options.seed)
    tokenizer = dataset.tokenizer
    model = build_model(options, data)
    loss, qvalue, value = build_loss(options, model, tokenizer.control.end_of_action)
    updater = SoftUpdate(loss, tau=options.tau)
    decoding = RunDecoding(guidance_clip=options.guidance_clip)
    guidance = ValueGuidance(loss.target_qvalue_network(), value, beta=options.beta, clip=decoding.guidance_clip)
    policy = UtteranceActor(
        loss.actor_network, tokenizer.control, evaluation.action_length, guidance=guidance, method="greedy"
    )

    def save(folder: Path) -> None:
        save_model(folder, model, loss, qvalue, tokenizer, value=value)
        if options.guidance_clip is not None:
            decoding.save(options.out)

    kept = held_out_rows(dataset, options.held_out)
    known = evaluation.known_values(kept)

    def report(rows: TensorDictBase) -> ValueReport:
        return value_report(
            loss.language_actor,
            loss.target_qvalue_network(),
            value,
            rows,
            tokenizer.control,
            gamma=options.gamma,
            turn_gamma=options.turn_gamma,
            known=known,
        )

    def check(rows: TensorDictBase) -> dict[str, float]:
        return {"held_out_loss": imitation_loss(loss.language_actor, rows), **report(rows).scalars()}

    best = train_offline(options, data, loss, policy, save, check, target_updater=updater)
    if len(kept):
        found = report(kept.to(model.lm.device))
        write_file(options.out / "values.json", json.dumps(found.as_dict(), indent=2) + "\n")
        print(found, flush=True)
    print(evaluation.next_steps(options.out), end="", flush=True)
    return best
