"""Modules that read their outputs out of the input, so that a loss can be given any values and logits."""

from __future__ import annotations

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from torchrl_lang.objectives import ILQLLoss


class TableTrunk(nn.Module):
    """Its hidden state is the table that came with the rows: ``V | Q | target Q | logits``."""

    def forward(self, table):
        return table


class TableHead(nn.Module):
    """Cuts its output out of the table."""

    def __init__(self, start, size, shape):
        super().__init__()
        self.start, self.size, self.shape = start, size, shape

    def forward(self, hidden):
        return hidden[..., self.start : self.start + self.size].unflatten(-1, self.shape)


class TableQ(nn.Module):
    """Online values where ``online`` is 1, the target's where it is 0: so the two parameter sets differ."""

    def __init__(self, heads, vocab):
        super().__init__()
        self.heads, self.vocab = heads, vocab
        self.online = nn.Parameter(torch.ones(()))

    def forward(self, hidden):
        size = self.heads * self.vocab
        online = hidden[..., 1 : 1 + size].unflatten(-1, (self.heads, self.vocab))
        target = hidden[..., 1 + size : 1 + 2 * size].unflatten(-1, (self.heads, self.vocab))
        return self.online * online + (1 - self.online) * target


def table_networks(heads, vocab):
    """Actor, Q and V whose trunk reads the entry ``table``, ``[B, T, 1 + 2 * heads * vocab + vocab]``."""
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(TableTrunk(), in_keys=["table"], out_keys=["hidden"]),
        TensorDictModule(TableHead(1 + 2 * heads * vocab, vocab, (vocab,)), in_keys=["hidden"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )
    qvalue = TensorDictModule(TableQ(heads, vocab), in_keys=["hidden"], out_keys=["action_value"])
    value = TensorDictModule(TableHead(0, 1, (1,)), in_keys=["hidden"], out_keys=["state_value"])
    return actor, qvalue, value


def table_loss(heads, vocab, **options):
    """An ILQLLoss over them."""
    return with_own_targets(ILQLLoss(*table_networks(heads, vocab), **options))


def with_own_targets(loss):
    """The loss with the target's values in its target head."""
    loss.target_qvalue_network_params.data.zero_()
    return loss


def make_table(v, q, target_q, logits):
    """Stack ``[B,T]``, ``[B,T,K,V]`` twice and ``[B,T,V]`` to the table."""
    return torch.cat([v.unsqueeze(-1), q.flatten(-2), target_q.flatten(-2), logits], -1)
