"""ILQL: learn what each token is worth from a fixed pile of games, then say what is worth most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrl.objectives import SoftUpdate
from transformers import PreTrainedModel

from torchrl_lang.modules import (
    QValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    qvalue_module,
    save_language_model,
    value_module,
)
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.recipes.offline import TEXTWORLD, OfflineOptions, build_actor, build_lm, train_offline
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.tasks import open_dataset
from torchrl_lang.training import seed_everything

__all__ = ["ILQL", "TextWorldILQL", "build_loss", "main"]


@dataclass(frozen=True)
class ILQL(OfflineOptions):
    """Implicit language Q-learning on a data set of games (arXiv 2206.11871)."""

    beta: float = option(4.0, "strength of the values in the policy that is evaluated while training", at_least=0)
    gamma: float = option(0.99, "discount, one a token of the agent's", at_least=0, at_most=1)
    expectile: float = option(0.8, "tau of the value's expectile regression", above=0, below=1)
    value_weight: float = option(0.2, "weight of V's loss beside the policy's", at_least=0)
    qvalue_weight: float = option(0.2, "weight of Q's loss", at_least=0)
    cql_weight: float = option(0.002, "weight of the conservative term", at_least=0)
    lmbda: float = option(0.5, "above 0 the value regresses on lambda-returns of the target Q", at_least=0, at_most=1)
    tau: float = option(0.02, "step of the target heads towards the online ones", above=0, at_most=1)


@with_defaults(beta=2.0, **TEXTWORLD)
class TextWorldILQL(ILQL):
    """Implicit language Q-learning from experts of mixed care in TextWorld games."""


def build_loss(options: ILQL, lm: PreTrainedModel, vocab_size: int) -> tuple[ILQLLoss, QValueHead, ValueHead]:
    """The loss, and the heads that it trains beside the language model."""
    width = lm.config.hidden_size
    qvalue, value = QValueHead(width, vocab_size).to(lm.device), ValueHead(width).to(lm.device)
    loss = ILQLLoss(
        build_actor(options, lm),
        qvalue_module(qvalue),
        value_module(value),
        gamma=options.gamma,
        expectile=options.expectile,
        value_weight=options.value_weight,
        qvalue_weight=options.qvalue_weight,
        cql_weight=options.cql_weight,
        target="lambda" if options.lmbda else "td",
        lmbda=options.lmbda,
        transition_weight=options.transition_weight,
        actor_normalizer="action",
    )
    return loss, qvalue, value


def main(options: ILQL) -> float:
    """Train; returns the best mean return."""
    dataset, task = open_dataset(options.data)
    seed_everything(options.seed)
    tokenizer = dataset.tokenizer
    lm = build_lm(options, dataset)
    loss, qvalue, value = build_loss(options, lm, tokenizer.vocab_size)
    updater = SoftUpdate(loss, tau=options.tau)
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=options.beta)
    policy = UtteranceActor(
        loss.actor_network, tokenizer.control, task.action_length, guidance=guidance, method="greedy"
    )

    def save(folder: Path) -> None:
        target = QValueHead(lm.config.hidden_size, tokenizer.vocab_size)
        target.load_state_dict(loss.target_qvalue_network_params.get("module").to_dict())
        heads: dict[str, QValueHead | ValueHead] = {"target_qvalue": target, "qvalue": qvalue, "value": value}
        save_language_model(folder, lm, heads, tokenizer=tokenizer.config())

    return train_offline(options, dataset, task, loss, policy, save, target_updater=updater)
