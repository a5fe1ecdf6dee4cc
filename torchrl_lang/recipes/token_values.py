"""Offline algorithms that learn values of tokens: ILQL, CQL, BCQ, psi-learning, Q-SFT and OREO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential

from torchrl_lang import _ranks
from torchrl_lang._files import write_file
from torchrl_lang.evaluation import imitation_loss, value_report
from torchrl_lang.evaluation.value_report import ValueReport
from torchrl_lang.functional import decision_mask, returns_to_go, shift_left, turn_end_mask
from torchrl_lang.modules import ValueHead, default_qvalue_head, qvalue_module, save_language_model, value_module
from torchrl_lang.modules.decoding.guidance import LikelihoodGuidance, ValueGuidance
from torchrl_lang.modules.heads import ActionValueHead
from torchrl_lang.modules.hugging_face import hidden_size
from torchrl_lang.modules.save import FEATURES_HEAD, VALUE_FEATURES_HEAD, language_model_of, saved_actor
from torchrl_lang.objectives import BCQLoss, CQLLoss, ILQLLoss, OREOLoss, PsiLoss, QSFTLoss
from torchrl_lang.objectives.values import QValueLoss
from torchrl_lang.recipes.algorithms import BCQ, CQL, ILQL, OREO, QSFT, Psi
from torchrl_lang.recipes.algorithms.offline import ActionValueOptions
from torchrl_lang.recipes.load_run import Method, RunDecoding
from torchrl_lang.recipes.models import begin, loss_options, model_of_start
from torchrl_lang.recipes.offline import OfflineData, held_out_rows, open_data
from torchrl_lang.text import Tokenizer
from torchrl_lang.transforms import frozen_copy


def build_loss(
    options: ILQL, lm: Any, actor: ProbabilisticTensorDictSequential, end_of_action: int
) -> tuple[ILQLLoss, ActionValueHead, ValueHead]:
    """The loss of ILQL, and the heads that it trains beside the language model of an actor."""
    qvalue, value = (
        default_qvalue_head(lm, normalize=options.normalize_states),
        ValueHead(hidden_size(lm.config), normalize=options.normalize_states).to(lm.device),
    )
    terms = loss_options(options, ILQLLoss, end_of_action=end_of_action)
    return ILQLLoss(actor, qvalue_module(qvalue), value_module(value), **terms), qvalue, value


def train_ilql(options: ILQL, data: OfflineData | None = None) -> float:
    """ILQL and its variants, with a report on their values in ``values.json``; see :func:`train_offline`.

    It learns from the data of the options or, already opened, from ``data``.
    """
    start = begin(options, data)
    loss, qvalue, value = build_loss(options, start.model.lm, start.actor, start.control.end_of_action)
    target, decoding = loss.target_qvalue_network(), RunDecoding(guidance_clip=options.guidance_clip)
    guidance = ValueGuidance(target, value, beta=options.beta, clip=decoding.guidance_clip)
    kept = held_out_rows(start.data.dataset, options.held_out)
    known = [] if start.data.task is None else start.data.task.known_values(kept)

    def report(rows: TensorDictBase) -> ValueReport:
        discounts: Any = {"gamma": options.gamma, "turn_gamma": options.turn_gamma}
        return value_report(start.actor, target, value, rows, start.control, known=known, **discounts)

    best = start.train(
        options,
        loss,
        start.policy(guidance=guidance, method="greedy"),
        lambda folder: start.save(folder, decoding, **start.with_target("qvalue", qvalue, loss), value=value),
        lambda rows: {"held_out_loss": imitation_loss(start.actor, rows), **report(rows).scalars()},
    )
    if len(kept) and _ranks.is_first():
        found = report(kept.to(start.model.lm.device))
        write_file(options.out / "values.json", json.dumps(found.as_dict(), indent=2) + "\n")
        print(found, flush=True)
    return best


def _train_backup(
    options: ActionValueOptions,
    kind: type[QValueLoss],
    *,
    method: Method = "greedy",
    data: OfflineData | None = None,
    **terms: Any,
) -> float:
    """Train a loss without a V. The policy of CQL is guided by its values, others play by their values alone.

    Args:
        options: of the recipe.
        kind: class of the loss.
        method: of the policy that is evaluated.
        data: already opened.
        **terms: of the loss beside the options.
    """
    start = begin(options, data)
    qvalue = default_qvalue_head(start.model.lm, normalize=options.normalize_states)
    # With an utterance actor no target is the value of a token that cannot be written.
    named = loss_options(options, kind, actor_normalizer="action", **terms)
    loss = kind(start.policy(), qvalue_module(qvalue), **named)
    least, beta = getattr(options, "threshold", None) or None, getattr(options, "beta", 1.0)
    decoding = RunDecoding(include_logits=isinstance(options, CQL), min_p=least)
    guidance = ValueGuidance(loss.target_qvalue_network(), beta=beta, include_logits=decoding.include_logits)
    return start.train(
        options,
        loss,
        start.policy(guidance=guidance, method=method, min_p=least),
        lambda folder: start.save(folder, decoding, **start.with_target("qvalue", qvalue, loss)),
    )


def train_cql(options: CQL) -> float:
    """Conservative Q-learning; see :func:`train_offline`."""
    return _train_backup(options, CQLLoss)


def train_bcq(options: BCQ) -> float:
    """Batch-constrained Q-learning, which plays by its values alone; see :func:`train_offline`."""
    return _train_backup(options, BCQLoss)


def train_psi(options: Psi) -> float:
    """Psi-learning, whose policy is the distribution of its values; see :func:`train_offline`."""
    data, prior = open_data(options), None
    if options.prior is not None:
        model = model_of_start(options.prior, data, options)
        model.lm.to(options.torch_device())
        prior = frozen_copy(saved_actor(model).requires_grad_(False))
    return _train_backup(options, PsiLoss, method="sample", data=data, prior=prior)


def train_qsft(options: QSFT) -> float:
    """Q-SFT: a second language model whose probabilities are values guides the first; see :func:`train_offline`."""
    data = open_data(options)
    tokenizer = data.dataset.tokenizer
    least, greatest = return_range(data.dataset.rows, tokenizer, options.gamma, options.turn_gamma)
    start = begin(options, data, unchanged=True)
    reference = start.reference(copied=True)  # it plays, guided by the model that trains
    terms = {
        "value_min": least if options.value_min is None else options.value_min,
        "value_max": greatest if options.value_max is None else options.value_max,
        "rest": tokenizer.control.pad if options.rest == "padding" else None,
        "actor_normalizer": "action",
    }
    loss = QSFTLoss(start.policy(), reference, **loss_options(options, QSFTLoss, **terms))
    imitates = reference.actor.decoder.actor
    decoding = RunDecoding(min_p=options.threshold or None, likelihood_ratio=options.guide == "ratio")

    def save(folder: Path) -> None:
        decoding.save(folder.parent)
        learned = start.model.heads.get(FEATURES_HEAD)
        heads = {} if learned is None else {FEATURES_HEAD: imitates[0].module.features, VALUE_FEATURES_HEAD: learned}
        begun = language_model_of(imitates)
        save_language_model(folder, begun, heads, tokenizer=tokenizer.config(), value_lm=start.model.lm)

    @torch.no_grad()
    def held_out(rows: TensorDictBase) -> dict[str, float]:
        out = loss(rows)
        return {"held_out_value_loss": float(out["loss_qvalue"]), "held_out_likelihood": float(out["likelihood"])}

    guidance = LikelihoodGuidance(start.actor, beta=options.beta, ratio=decoding.likelihood_ratio)
    limit = decoding.min_p if decoding.likelihood_ratio else None
    guided = start._replace(actor=imitates).policy(guidance=guidance, method="greedy", min_p=limit)
    return start.train(options, loss, guided, save, held_out)


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


def train_oreo(options: OREO) -> float:
    """OREO: a policy and its values, consistent on the paths of the data; see :func:`train_offline`."""
    start = begin(options, unchanged=True)
    reference, lm = start.reference(), start.model.lm
    value = ValueHead(hidden_size(lm.config), normalize=options.normalize_states).to(lm.device)
    terms = loss_options(options, OREOLoss, beta=options.reward_scale, actor_normalizer="action")
    loss = OREOLoss(start.policy(), value_module(value), reference, **terms)
    return start.train(options, loss, start.policy(method="greedy"), lambda folder: start.save(folder, value=value))
