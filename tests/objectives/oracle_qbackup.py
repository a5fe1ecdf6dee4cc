"""CQL, BCQ and psi-learning by plain loops over single decisions in float64."""

from __future__ import annotations

import numpy as np

from tests.objectives.oracle import decisions_of


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def huber(u):
    return 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5


def slot_after(tokens, agent_mask, p, end):
    """How many tokens of an unfinished utterance stand at the end of the row up to position ``p``."""
    count = 0
    while p - count >= 0 and agent_mask[p - count] and tokens[p - count] != end:
        count += 1
    return count


def qbackup_losses(
    rows, q, target_q, logits, kind, *, gamma=0.99, turn_gamma=None, end_of_action=None, cql_temperature=1.0,
    threshold=0.0, reward_scale=1.0, value_min=None, value_max=None, transition_weight=0.0, normalizer="all",
    forbidden=(), action_length=None, prior=None,
):  # fmt: skip
    """Unweighted terms. ``q`` and ``target_q [B,T,K,V]``, ``logits`` and ``prior [B,T,V]``, all float64."""
    tokens, attention, agent_mask = rows["tokens"], rows["attention_mask"], rows["agent_mask"]
    reward, terminated = rows["token_reward"], rows["terminated"][:, 0]
    train = rows.get("train_mask", np.ones_like(agent_mask))
    low, high = -np.inf if value_min is None else value_min, np.inf if value_max is None else value_max
    prior = logits if prior is None else prior
    vocab = q.shape[-1]

    def allowed(b, p):
        if action_length is not None and slot_after(tokens[b], agent_mask[b], p, end_of_action) >= action_length - 1:
            return [end_of_action]
        return [a for a in range(vocab) if a not in forbidden]

    def backup(b, p):
        some = allowed(b, p)
        target = {a: np.clip(min(target_q[b, p, :, a]), low, high) for a in some}
        if kind == "cql":
            return max(target.values())
        probability = {a: np.exp(log_softmax(logits[b, p])[a]) for a in some}
        most = max(probability.values())
        kept = [a for a in some if probability[a] / most >= threshold]
        if kind == "psi":
            values = np.array([target[a] for a in kept])
            return values.max() + np.log(np.exp(values - values.max()).sum())
        return target[max(kept, key=lambda a: min(q[b, p, :, a]))]

    sums = dict.fromkeys(("qvalue", "cql", "actor"), 0.0)
    n = positions_counted = 0
    for b in range(tokens.shape[0]):
        positions, last = decisions_of(agent_mask, attention, b)
        states = [*positions, last]
        for j, p in enumerate(positions):
            a = tokens[b, p + 1]
            if not train[b, p + 1]:
                continue
            n += 1
            ended = j == len(positions) - 1 and terminated[b]
            turn_end = p + 2 <= last and not agent_mask[b, p + 2]
            turn_end |= end_of_action is not None and a == end_of_action
            discount = turn_gamma if turn_end and turn_gamma is not None else gamma
            r = reward[b, p + 1]
            if kind == "psi":
                r = r / reward_scale + log_softmax(prior[b, p])[a]
            y = r + (0.0 if ended else discount * backup(b, states[j + 1]))
            for k in range(q.shape[2]):
                u = y - q[b, p, k, a]
                sums["qvalue"] += u**2 if kind == "cql" else huber(u)
                sums["cql"] -= log_softmax(q[b, p, k] / cql_temperature)[a]
        for t in range(tokens.shape[1] - 1):
            if not attention[b, t + 1] or (agent_mask[b, t + 1] and not train[b, t + 1]):
                continue
            positions_counted += 1
            weight = 1.0 if agent_mask[b, t + 1] else transition_weight
            sums["actor"] -= weight * log_softmax(logits[b, t])[tokens[b, t + 1]]
    losses = {name: total / max(n, 1) for name, total in sums.items()}
    losses["actor"] = sums["actor"] / max(positions_counted if normalizer == "all" else n, 1)
    return losses
