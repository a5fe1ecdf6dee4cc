"""The losses with one value for each utterance by plain loops in float64: slow, and hard to get wrong."""

from __future__ import annotations

import numpy as np

from tests.objectives.conftest import utterances_of


def log_sum_exp(x):
    return np.log(np.exp(x - x.max()).sum()) + x.max()


def utterance_ilql_losses(
    rows, v, q, target_q, logits, *, gamma=0.99, expectile=0.7, beta=0.0, weighting="exp", clip=None,
    transition_weight=0.0, normalizer="all", end_of_action=None, trained=None,
):  # fmt: skip
    """Unweighted terms. ``v [B,T]``, ``q`` and ``target_q [B,T,K]``, ``logits [B,T,V]``; ``trained [B,T]`` by token."""
    sums, number, tokens_counted = dict.fromkeys(("value", "qvalue", "actor"), 0.0), 0, 0
    for b in range(len(v)):
        found, boot = utterances_of(rows, b, end_of_action)
        length = int(rows["attention_mask"][b].sum())
        agent = [p for p in range(1, length) if rows["agent_mask"][b, p]]
        counts = {p: trained is None or p not in agent or bool(trained[b, p]) for p in range(1, length)}
        advantage = dict.fromkeys(agent, 0.0)
        for i, utterance in enumerate(found):
            state, read = utterance[0] - 1, utterance[-1] - 1
            least = target_q[b, read].min()
            advantage |= dict.fromkeys(utterance, least - v[b, state])
            if not counts[utterance[-1]]:
                continue
            number += 1
            if i + 1 < len(found):
                following = v[b, found[i + 1][0] - 1]
            else:
                following = 0.0 if rows["terminated"][b] else v[b, boot]
            goal = sum(rows["token_reward"][b, p] for p in utterance) + gamma * following
            sums["qvalue"] += sum((goal - x) ** 2 for x in q[b, read])
            u = least - v[b, state]
            sums["value"] += (expectile if u >= 0 else 1 - expectile) * u**2
        for p in range(1, length):
            if not counts[p]:
                continue
            weight = transition_weight
            if p in agent:
                a = advantage[p]
                weight = np.exp(beta * a) if weighting == "exp" else (beta if a > 0 else 1 - beta)
            weight = weight if clip is None else min(weight, clip)
            tokens_counted += normalizer == "all" or p in agent
            z = logits[b, p - 1]
            sums["actor"] += weight * (log_sum_exp(z) - z[rows["tokens"][b, p]])
    return {
        "value": sums["value"] / max(number, 1),
        "qvalue": sums["qvalue"] / max(number, 1),
        "actor": sums["actor"] / max(tokens_counted, 1),
    }


def chai_losses(rows, q, candidate_q, candidate_target_q, log_prob, *, gamma=0.99, trained=None, room=None):
    """Unweighted terms, for lists by row and state: ``q[b][i] [K]`` and ``candidate_q[b][i] [C,K]``.

    States without ``room`` ``[b][i]`` have no candidates.
    """
    sums, known, proposed = {"qvalue": 0.0, "cql": 0.0}, 0, 0
    for b in range(len(q)):
        found, _ = utterances_of(rows, b, 1)
        for i, utterance in enumerate(found):
            if trained is not None and not trained[b, utterance[-1]]:
                continue
            if room is None or room[b][i]:
                weighted = np.exp(candidate_q[b][i]) / np.exp(log_prob[b][i])[:, None]
                sums["cql"] += (np.log(weighted.mean(0)) - q[b][i]).sum()
                proposed += 1
            over = i + 1 == len(found) and bool(rows["terminated"][b])
            if not over and room is not None and not room[b][i + 1]:
                continue
            following = 0.0 if over else candidate_target_q[b][i + 1].min(-1).max()
            goal = sum(float(rows["token_reward"][b, p]) for p in utterance) + gamma * following
            sums["qvalue"] += ((goal - q[b][i]) ** 2).sum()
            known += 1
    return {"qvalue": sums["qvalue"] / max(known, 1), "cql": sums["cql"] / max(proposed, 1)}
