"""Losses with one value for each utterance, and the utterances of rows by plain loops."""

from __future__ import annotations

import torch

from torchrl_lang.modules import UtteranceQValueHead, ValueHead, qvalue_module, value_module
from torchrl_lang.objectives import UtteranceILQLLoss

WIDTH = 16


def moved(head, seed):
    """The head with weights away from zero, so that equal numbers mean something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(generator=generator).mul_(0.2)
    return head


def make_utterance_ilql(actor, **options):
    q, v = moved(UtteranceQValueHead(WIDTH), 1), moved(ValueHead(WIDTH), 2)
    return UtteranceILQLLoss(actor, qvalue_module(q), value_module(v), **options)


def utterances_of(rows, row, end_of_action=None):
    """One row's finished utterances as lists of the positions of their tokens, and the position that bootstraps."""
    tokens, agent, length = rows["tokens"][row], rows["agent_mask"][row], int(rows["attention_mask"][row].sum())
    found, current = [], []
    for p in range(1, length):
        if not agent[p]:
            continue
        current.append(p)
        replied = p + 1 < length and not agent[p + 1]
        ended = bool(rows["terminated"][row]) and not agent[p + 1 :].any()
        if replied or ended or (end_of_action is not None and tokens[p] == end_of_action):
            found.append(current)
            current = []
    return found, (current[0] - 1 if current else length - 1)


def number_of_utterances(rows, end_of_action=None):
    return sum(len(utterances_of(rows, row, end_of_action)[0]) for row in range(len(rows)))
