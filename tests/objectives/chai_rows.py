"""Rows with the columns of CHAI, from a language model with random weights; every loss with rows that it reads."""

from __future__ import annotations

import torch

from tests.objectives.conftest import LOSSES, WIDTH, make_actor, make_rows
from tests.objectives.utterances import moved
from torchrl_lang.modules import CandidateSampler, UtteranceActor, UtteranceQValueHead, qvalue_module
from torchrl_lang.objectives import CHAILoss
from torchrl_lang.schema import ControlTokens

CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)
CANDIDATES = 3


def make_policy(seed=0, **options):
    return UtteranceActor(make_actor(), CONTROL, 4, **{"forbidden": (0,), "seed": seed, **options})


def chai_rows(n=6, seed=0):
    """Ragged rows; a row with an utterance that is cut off is among the truncated ones."""
    rows = make_rows(n, seed=seed)
    return CandidateSampler(make_policy(seed), CANDIDATES, rows_at_a_time=4)(rows)


def make_chai(**options):
    head = moved(UtteranceQValueHead(WIDTH), 1)
    loss = CHAILoss(qvalue_module(head), **options)
    target = loss.target_qvalue_network_params
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for value in target.values(True, True):
            value.data.add_(torch.randn_like(value) * 0.1)  # so that the two networks differ
    return loss


def every_loss(n=6):
    """Constructor and rows ``[n]`` of each loss, by name: those of the contract suite, and CHAI."""
    rows = make_rows(n)
    return {**{name: (make, rows) for name, make in LOSSES.items()}, "chai": (make_chai, chai_rows(n))}
