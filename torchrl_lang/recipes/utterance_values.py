"""Offline algorithms that learn values of whole utterances: CHAI and utterance-level ILQL."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from torchrl_lang.modules import (
    CandidateSampler,
    CHAIActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    ValueHead,
    qvalue_module,
    value_module,
)
from torchrl_lang.modules.hugging_face import hidden_size
from torchrl_lang.objectives import CHAILoss, UtteranceILQLLoss
from torchrl_lang.recipes.algorithms import CHAI, UtteranceILQL
from torchrl_lang.recipes.load_run import RunDecoding
from torchrl_lang.recipes.models import begin, loss_options
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.training import total_loss
from torchrl_lang.training.progress import Progress


def train_chai(options: CHAI) -> float:
    """CHAI: values of utterances that a finished run's language model proposes; see :func:`train_offline`."""
    start = begin(options, unchanged=True)
    start.actor.requires_grad_(False)
    lm = start.model.lm
    qvalue = UtteranceQValueHead(hidden_size(lm.config), normalize=options.normalize_states).to(lm.device)
    loss = CHAILoss(qvalue_module(qvalue), **loss_options(options, CHAILoss))
    policy = CHAIActor(start.policy(), loss.target_qvalue_network(), candidates=options.candidates)

    def with_candidates(rows: TensorDictBase) -> TensorDictBase:
        sampling = start.policy(seed=options.seed)
        with Progress(len(rows), label="candidates", unit="row") as progress:
            sampler = CandidateSampler(sampling, options.proposals, progress=lambda done, _: progress.update(done, {}))
            return sampler(rows)

    kept = held_out_rows(start.data.dataset, options.held_out)
    checked = with_candidates(kept.to(lm.device)) if len(kept) else kept

    @torch.no_grad()
    def held_out(rows: TensorDictBase) -> dict[str, float]:
        """The loss of the values on held-out rows. No checkpoint is chosen by it: it is least where Q is still zero."""
        return {"held_out_value_loss": float(total_loss(loss(checked)))}

    return start.train(
        options,
        loss,
        policy,
        lambda folder: start.save(folder, **start.with_target("chai_qvalue", qvalue, loss)),
        held_out,
        prepare=with_candidates,
    )


def train_utterance_ilql(options: UtteranceILQL) -> float:
    """ILQL with one value for each utterance, which plays the best of some samples; see :func:`train_offline`."""
    start = begin(options)
    lm = start.model.lm
    width = hidden_size(lm.config)
    qvalue, value = (
        UtteranceQValueHead(width, normalize=options.normalize_states).to(lm.device),
        ValueHead(width, normalize=options.normalize_states).to(lm.device),
    )
    more = {"end_of_action": start.control.end_of_action, "actor_normalizer": "action"}
    terms = loss_options(options, UtteranceILQLLoss, **more)
    loss = UtteranceILQLLoss(start.actor, qvalue_module(qvalue), value_module(value), **terms)
    policy = start.policy(
        guidance=UtteranceValueGuidance(loss.target_qvalue_network()),
        method="best_of",
        candidates=options.candidates,
        end_value_weight=1.0,
        log_prob_weight=options.log_prob_weight,
    )
    decoding = RunDecoding(log_prob_weight=options.log_prob_weight)
    return start.train(
        options,
        loss,
        policy,
        lambda folder: start.save(folder, decoding, **start.with_target("utterance_qvalue", qvalue, loss), value=value),
    )
