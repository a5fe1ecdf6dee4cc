"""The losses of a batch of rows by plain loops over single decisions in float64: slow, and hard to get wrong."""

from __future__ import annotations

import numpy as np


def decisions_of(agent_mask, attention_mask, row):
    """Positions of one row's decisions, and the position of its last real token."""
    positions = [p for p in range(agent_mask.shape[1] - 1) if agent_mask[row, p + 1]]
    return positions, int(attention_mask[row].sum()) - 1


def ilql_losses(
    rows, v, q, target_q, logits, *, gamma=0.99, expectile=0.7, cql_temperature=1.0, margin=0.0, beta=0.0,
    weighting="exp", clip=None, transition_weight=0.0, value_min=None, value_max=None, target="td", lmbda=0.95,
    normalizer="all", turn_gamma=None,
):  # fmt: skip
    """Unweighted terms. ``v [B,T]``, ``q`` and ``target_q [B,T,K,V]``, ``logits [B,T,V]``, all float64."""
    tokens, attention, agent_mask = rows["tokens"], rows["attention_mask"], rows["agent_mask"]
    reward, terminated = rows["token_reward"], rows["terminated"][:, 0]
    sums = dict.fromkeys(("value", "qvalue", "cql", "margin", "actor"), 0.0)
    n = 0
    for b in range(tokens.shape[0]):
        positions, last = decisions_of(agent_mask, attention, b)
        states = [*positions, last]
        weights = np.full(tokens.shape[1], transition_weight)
        r = [reward[b, p + 1] for p in positions]
        # The discount after each decision.
        g = [turn_gamma if turn_gamma is not None and p + 2 <= last and not agent_mask[b, p + 2] else gamma
             for p in positions]  # fmt: skip
        boot = 0.0 if terminated[b] else v[b, last]
        tq = [min(target_q[b, p, k, tokens[b, p + 1]] for k in range(q.shape[2])) for p in positions]
        tq = [
            np.clip(x, -np.inf if value_min is None else value_min, np.inf if value_max is None else value_max)
            for x in tq
        ]
        for j, p in enumerate(positions):
            n += 1
            a = tokens[b, p + 1]
            goal = tq[j]
            if target == "mc":
                goal = sum(np.prod(g[j:i]) * r[i] for i in range(j, len(r)))
            if target == "lambda":
                goal = boot
                for i in range(len(r) - 1, j - 1, -1):
                    goal = (1 - lmbda) * tq[i] + lmbda * (r[i] + g[i] * goal)
            u = goal - v[b, p]
            sums["value"] += (expectile if u >= 0 else 1 - expectile) * u**2
            end = j == len(positions) - 1
            y = r[j] + g[j] * (boot if end else v[b, states[j + 1]])
            for k in range(q.shape[2]):
                sums["qvalue"] += (y - q[b, p, k, a]) ** 2
                z = q[b, p, k] / cql_temperature
                sums["cql"] += np.log(np.exp(z - z.max()).sum()) + z.max() - z[a]
                sums["margin"] += sum(max(0.0, x - q[b, p, k, a] + margin) ** 2 for x in q[b, p, k])
            advantage = tq[j] - v[b, p]
            weights[p] = np.exp(beta * advantage) if weighting == "exp" else (beta if advantage > 0 else 1 - beta)
        if clip is not None:
            weights = np.minimum(weights, clip)
        for t in range(tokens.shape[1] - 1):
            if attention[b, t + 1]:
                z = logits[b, t]
                sums["actor"] += weights[t] * (np.log(np.exp(z - z.max()).sum()) + z.max() - z[tokens[b, t + 1]])
    count = attention[:, 1:].sum() if normalizer == "all" else n
    losses = {name: total / max(n, 1) for name, total in sums.items()}
    losses["actor"] = sums["actor"] / max(count, 1)
    return losses
