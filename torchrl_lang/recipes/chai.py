"""CHAI: learn which utterances of a finished run's language model to play, from features that are computed once."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torchrl.objectives import SoftUpdate

from torchrl_lang.modules import (
    CandidateSampler,
    CHAIActor,
    UtteranceActor,
    UtteranceQValueHead,
    qvalue_module,
    save_language_model,
)
from torchrl_lang.objectives import CHAILoss
from torchrl_lang.recipes.algorithms import CHAI
from torchrl_lang.recipes.offline import build_actor, held_out_rows, open_data, train_offline
from torchrl_lang.recipes.saved_qvalues import saved_qvalues
from torchrl_lang.recipes.start_model import build_model
from torchrl_lang.training import Progress, total_loss

__all__ = ["CHAI", "main"]


def main(options: CHAI) -> float:
    """Train; returns the best mean return, see :func:`train_offline`.

    Raises:
        ValueError: there is no run to start from, or blocks of its language model are to be trained.
    """
    if options.start is None:
        raise ValueError("CHAI chooses among what a trained language model writes: give a run of BC with --start RUN.")
    if options.top_layers is not None:
        raise ValueError(f"CHAI trains no block of the language model: leave out top_layers={options.top_layers}.")
    data = open_data(options)
    torch.manual_seed(options.seed)
    tokenizer = data.dataset.tokenizer
    model = build_model(options, data, as_it_is=True)
    lm, length = model.lm, data.evaluation.action_length
    actor = build_actor(options, model).requires_grad_(False)
    qvalue = UtteranceQValueHead(lm.config.hidden_size).to(lm.device)
    loss = CHAILoss(qvalue_module(qvalue), gamma=options.gamma, cql_weight=options.cql_weight)
    policy = CHAIActor(
        UtteranceActor(actor, tokenizer.control, length), loss.target_qvalue_network(), candidates=options.candidates
    )

    def with_candidates(rows: TensorDictBase) -> TensorDictBase:
        sampling = UtteranceActor(actor, tokenizer.control, length, seed=options.seed)
        with Progress(len(rows), label="candidates", unit="row") as progress:
            sampler = CandidateSampler(sampling, options.proposals, progress=lambda done, _: progress.update(done, {}))
            return sampler(rows)

    def save(folder: Path) -> None:
        heads = {**saved_qvalues("chai_qvalue", qvalue, deepcopy(qvalue), loss), **model.heads}
        save_language_model(folder, lm, heads, tokenizer=tokenizer.config())

    kept = held_out_rows(data.dataset, options.held_out)
    checked = with_candidates(kept.to(lm.device)) if len(kept) else kept

    @torch.no_grad()
    def check(rows: TensorDictBase) -> dict[str, float]:
        """The loss of the values on held-out rows. No checkpoint is chosen by it: it is least where Q is still zero."""
        return {"held_out_value_loss": float(total_loss(loss(checked)))}

    updater = SoftUpdate(loss, tau=options.tau)
    best = train_offline(options, data, loss, policy, save, check, target_updater=updater, prepare=with_candidates)
    print(data.evaluation.next_steps(options.out), end="", flush=True)
    return best
