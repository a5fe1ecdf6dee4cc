"""ILQL in plain PyTorch as it is commonly written: every head over every position, four vocabulary-sized tables."""

from __future__ import annotations

from copy import deepcopy

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from torchrl_lang.modules import QValueHead, ValueHead


class NaiveILQL(nn.Module):
    """The same losses as :class:`torchrl_lang.objectives.ILQLLoss` with its defaults, for heads of the kind "mlp"."""

    def __init__(self, lm: PreTrainedModel, qvalue: QValueHead, value: ValueHead, cql_weight: float = 0.01) -> None:
        super().__init__()
        self.lm, self.cql_weight = lm, cql_weight
        self.q = nn.ModuleList(_mlp(qvalue, k) for k in range(qvalue.out_weight.shape[0]))
        self.target_q = deepcopy(self.q).requires_grad_(False)
        self.v = _mlp(value, 0)

    def forward(self, rows: TensorDictBase, gamma: float = 0.99, expectile: float = 0.7) -> dict[str, Tensor]:
        tokens, real = rows["tokens"], rows["attention_mask"]
        out = self.lm(input_ids=tokens, attention_mask=real.long(), output_hidden_states=True, use_cache=False)
        hidden, logits = out.hidden_states[-1], out.logits[:, :-1]  # [B, T, H], [B, T - 1, V]
        decision, action = rows["agent_mask"][:, 1:], tokens[:, 1:]
        n = decision.sum().clamp_min(1)

        v = self.v(hidden).squeeze(-1)  # [B, T]
        q = [head(hidden)[:, :-1] for head in self.q]  # [B, T - 1, V] each
        with torch.no_grad():
            target_q = [head(hidden)[:, :-1] for head in self.target_q]
        taken = torch.stack([_pick(table, action) for table in q], -1)  # [B, T - 1, n_q]
        target = torch.stack([_pick(table, action) for table in target_q], -1).amin(-1)

        successor, last = _successors(decision, real)
        next_v = v.detach().gather(1, successor) * ~(last & rows["terminated"])
        error = target - v[:, :-1]
        expected = rows["token_reward"][:, 1:] + gamma * next_v
        losses = {
            "loss_value": (torch.where(error >= 0, expectile, 1 - expectile) * error.square() * decision).sum() / n,
            "loss_qvalue": ((expected.unsqueeze(-1) - taken).square().sum(-1) * decision).sum() / n,
            "loss_actor": (_cross_entropy(logits, action) * decision).sum() / real[:, 1:].sum(),
        }
        if self.cql_weight:
            cql = sum(_cross_entropy(table, action) for table in q)
            losses["loss_cql"] = self.cql_weight * (cql * decision).sum() / n
        return losses


def _mlp(head: QValueHead | ValueHead, k: int) -> nn.Sequential:
    first, last = (nn.utils.skip_init(nn.Linear, *weight[k].T.shape) for weight in (head.in_weight, head.out_weight))
    for layer, weight, bias in ((first, head.in_weight, head.in_bias), (last, head.out_weight, head.out_bias)):
        layer.weight.data.copy_(weight.data[k])
        layer.bias.data.copy_(bias.data[k])
    return nn.Sequential(first, nn.ReLU(), last)


def _pick(table: Tensor, action: Tensor) -> Tensor:
    return table.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def _cross_entropy(table: Tensor, action: Tensor) -> Tensor:
    return F.cross_entropy(table.flatten(0, 1), action.flatten(), reduction="none").view_as(action)


def _successors(decision: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each position's next decision, or of the row's last token; and where it is the latter."""
    end = real.sum(-1, keepdim=True) - 1
    position = torch.arange(decision.shape[1], device=decision.device).expand_as(decision)
    following = torch.where(decision, position, decision.shape[1] + 1)
    following = F.pad(following[:, 1:], (0, 1), value=decision.shape[1] + 1)
    following = following.flip(-1).cummin(-1).values.flip(-1)
    last = following > decision.shape[1]
    return torch.where(last, end, following), last
