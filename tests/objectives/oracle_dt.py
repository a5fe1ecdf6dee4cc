"""The decision transformer's loss by plain loops in float64, from a model's weights and its returns' embedding."""

from __future__ import annotations

import numpy as np
import torch


def carried_returns(rows, b, mode, end_of_action=None):
    """Position -> return of one row."""
    reward, agent = rows["token_reward"][b].tolist(), rows["agent_mask"][b].tolist()
    tokens, length = rows["tokens"][b].tolist(), int(rows["attention_mask"][b].sum())
    if mode == "constant":
        return {0: sum(reward[:length])}
    found = {}
    for p in range(length - 1):
        writes = agent[p + 1]
        begins = not agent[p] or tokens[p] == end_of_action
        if writes and begins:
            found[p] = sum(reward[t] for t in range(p + 1, length))
    return found


def dt_loss(rows, lm, returns, *, transition_weight=0.0, normalizer="all", train_mask=None, end_of_action=None):
    """``loss_actor`` of rows that hold no row alone of padding; ``lm`` and ``returns`` in float64."""
    table = lm.get_input_embeddings().weight.detach()
    w, bias = returns.weight.detach().numpy(), returns.bias.detach().numpy()
    total, tokens_counted, decisions = 0.0, 0, 0
    for b in range(len(rows)):
        length = int(rows["attention_mask"][b].sum())
        ids = rows["tokens"][b, :length]
        embedded = table[ids].numpy().copy()
        for p, value in carried_returns(rows, b, returns.mode, end_of_action).items():
            step = (returns.high - returns.low) / (returns.n_bins - 1)
            rounded = returns.low + step * round((value - returns.low) / step)
            embedded[p] += w * (2 * (rounded - returns.low) / (returns.high - returns.low) - 1) + bias
        with torch.no_grad():
            logits = lm(inputs_embeds=torch.from_numpy(embedded)[None]).logits[0].numpy()
        for t in range(length - 1):
            mine = bool(rows["agent_mask"][b, t + 1])
            if mine and train_mask is not None and not train_mask[b, t + 1]:
                continue
            z = logits[t]
            loss = np.log(np.exp(z - z.max()).sum()) + z.max() - z[int(ids[t + 1])]
            total += (1.0 if mine else transition_weight) * loss
            tokens_counted += 1
            decisions += mine
    return total / max(tokens_counted if normalizer == "all" else decisions, 1)
