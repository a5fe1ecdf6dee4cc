"""Learned values of the last tokens of rows and of ending the utterance there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang.modules import ACTION_VALUE, split_actor
from torchrl_lang.modules.decoding.model_runner import apply_head, read_rows
from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.schema import ControlTokens

__all__ = ["last_values"]


@torch.no_grad()
def last_values(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    rows: Sequence[Tensor],
    control: ControlTokens,
    *,
    count: int = 0,
    features: TensorDictBase | None = None,
    batch_size: int = 256,
) -> Tensor:
    """``min_k Q_k`` of the last ``count`` tokens of each row and of ending the utterance after them.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        rows: int64 ``[T_i]`` each, without padding, longer than ``count``.
        control: the control tokens of the rows.
        count: number of tokens before the end.
        features: ``features`` and, where some are masked, ``features_mask`` of the ``N`` rows, for a trunk that reads
        them.
        batch_size: rows at a time.

    Returns:
        float ``[N, count + 1]``, on the CPU.
    """
    device = next(actor.parameters()).device
    end = torch.tensor([control.end_of_action])
    with eval_mode(nn.ModuleList([actor, qvalue])):
        parts = []
        for first in range(0, len(rows), batch_size):
            chosen = rows[first : first + batch_size]
            tokens = pad_sequence(list(chosen), batch_first=True, padding_value=control.pad).to(device)
            length = torch.tensor([len(row) for row in chosen], device=device)
            attention = torch.arange(tokens.shape[1], device=device) < length[:, None]
            part = None if features is None else features[first : first + batch_size]
            own = None if part is None else RowFeatures.needed("last_values", part, part.batch_size).to(device)
            states = read_rows(split_actor(actor).trunk, tokens, attention, own)
            place = length[:, None] - 1 - torch.arange(count, -1, -1, device=device)
            number = torch.arange(len(chosen), device=device)[:, None]
            before = {key: state[number, place].flatten(0, 1) for key, state in states.items()}
            taken = torch.stack([torch.cat([row[len(row) - count :].cpu(), end]) for row in chosen]).to(device)
            q = apply_head(qvalue, before, ACTION_VALUE).amin(-2).gather(-1, taken.reshape(-1, 1))
            parts.append(q.reshape(taken.shape).cpu())
    return torch.cat(parts)
