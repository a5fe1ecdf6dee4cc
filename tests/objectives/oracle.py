"""The losses of a batch of rows by plain loops over single decisions in float64: slow, and hard to get wrong.

Rows are numpy arrays by name. Terms are unweighted. ``v [B,T]``, ``q`` and ``target_q [B,T,K,V]``, ``logits [B,T,V]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.objectives.models import utterances_of


def assert_matches(out, expected, prefix="", **tolerance):
    """Outputs of a loss are these numbers, by name."""
    for name, value in expected.items():
        np.testing.assert_allclose(out[prefix + name].item(), value, err_msg=name, **tolerance)


def numpy_rows(rows):
    return {key: value.numpy() for key, value in rows.items() if isinstance(value, torch.Tensor)}


def log_sum_exp(z):
    return np.log(np.exp(z - z.max()).sum()) + z.max()


def log_softmax(z):
    return z - log_sum_exp(z)


@dataclass
class Decision:
    row: int
    at: int  # position of its state
    token: int
    reward: float
    after: int  # position of the next state
    over: bool  # the episode ends with it
    ends: bool  # its token is the last one of an utterance
    discount: float
    trained: bool


def decisions_of(rows, gamma=1.0, turn_gamma=None, end_of_action=None):
    """Those of each row."""
    tokens, agent, found = rows["tokens"], rows["agent_mask"], []
    trained = rows.get("train_mask", agent)
    for b, length in enumerate(rows["attention_mask"].sum(-1)):
        places = [p for p in range(length - 1) if agent[b, p + 1]]
        found.append([])
        for p, after in zip(places, [*places[1:], length - 1], strict=False):
            token, over = tokens[b, p + 1], p == places[-1] and rows["terminated"][b, 0]
            ends = (p + 2 < length and not agent[b, p + 2]) or token == end_of_action
            discount = turn_gamma if ends and turn_gamma is not None else gamma
            reward, counts = rows["token_reward"][b, p + 1], trained[b, p + 1]
            found[-1].append(Decision(b, p, token, reward, after, over, ends, discount, counts))
    return found


def actor_loss(rows, logits, weights, transition_weight, normalizer="all"):
    """Cross-entropy of the tokens that are trained on; of the agent's times ``weights``, a number or ``[B,T]``."""
    agent = rows["agent_mask"]
    counted = rows["attention_mask"] & (rows.get("train_mask", agent) | ~agent)
    weights, total = np.broadcast_to(weights, agent.shape), 0.0
    for b, t in np.argwhere(counted[:, 1:]):
        weight = weights[b, t] if agent[b, t + 1] else transition_weight
        total -= weight * log_softmax(logits[b, t])[rows["tokens"][b, t + 1]]
    return total / max((counted if normalizer == "all" else counted & agent)[:, 1:].sum(), 1)


def advantage_weights(advantage, beta, weighting, clip):
    weights = np.exp(beta * advantage) if weighting == "exp" else np.where(advantage > 0, beta, 1 - beta)
    return weights if clip is None else np.minimum(weights, clip)


def bounds(value_min, value_max):
    return -np.inf if value_min is None else value_min, np.inf if value_max is None else value_max


def ilql_losses(
    rows, v, q, target_q, logits, *, gamma=0.99, expectile=0.7, cql_temperature=1.0, margin=0.0, beta=0.0,
    weighting="exp", clip=None, transition_weight=0.0, value_min=None, value_max=None, target="td", lmbda=0.95,
    normalizer="all", turn_gamma=None,
):  # fmt: skip
    sums, n, advantage = dict.fromkeys(("value", "qvalue", "cql", "margin"), 0.0), 0, np.zeros(v.shape)
    for row in decisions_of(rows, gamma, turn_gamma):
        goals = {}
        for d in reversed(row):
            n += 1
            value, after = v[d.row, d.at], 0.0 if d.over else v[d.row, d.after]
            least = np.clip(min(target_q[d.row, d.at, :, d.token]), *bounds(value_min, value_max))
            goals["td"] = least
            goals["mc"] = d.reward + d.discount * goals.get("mc", 0.0)
            later = d.reward + d.discount * goals.get("lambda", after)
            goals["lambda"] = (1 - lmbda) * least + lmbda * later
            u = goals[target] - value
            sums["value"] += (expectile if u >= 0 else 1 - expectile) * u**2
            advantage[d.row, d.at] = least - value
            for one in q[d.row, d.at]:
                sums["qvalue"] += (d.reward + d.discount * after - one[d.token]) ** 2
                sums["cql"] -= log_softmax(one / cql_temperature)[d.token]
                sums["margin"] += sum(max(0.0, x - one[d.token] + margin) ** 2 for x in one)
    losses = {name: total / max(n, 1) for name, total in sums.items()}
    transition_weight = transition_weight if clip is None else min(transition_weight, clip)
    weights = advantage_weights(advantage, beta, weighting, clip)
    return losses | {"actor": actor_loss(rows, logits, weights, transition_weight, normalizer)}


# -- the relatives -----------------------------------------------------------------------------------------------------


def huber(u):
    return 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5


def writable(rows, b, p, vocab, forbidden, end, action_length):
    """Tokens that can be written behind position ``p``: in the last slot of an utterance its end alone."""
    slot, tokens, agent = 0, rows["tokens"][b], rows["agent_mask"][b]
    while slot <= p and agent[p - slot] and tokens[p - slot] != end:
        slot += 1
    if action_length is not None and slot >= action_length - 1:
        return [end]
    return [a for a in range(vocab) if a not in forbidden]


def qbackup_losses(
    rows, q, target_q, logits, kind, *, gamma=0.99, turn_gamma=None, end_of_action=None, cql_temperature=1.0,
    threshold=0.0, reward_scale=1.0, value_min=None, value_max=None, transition_weight=0.0, normalizer="all",
    forbidden=(), action_length=None,
):  # fmt: skip
    def backup(b, p):
        some = writable(rows, b, p, q.shape[-1], forbidden, end_of_action, action_length)
        target = {a: np.clip(min(target_q[b, p, :, a]), *bounds(value_min, value_max)) for a in some}
        if kind == "cql":
            return max(target.values())
        probability = {a: np.exp(log_softmax(logits[b, p])[a]) for a in some}
        kept = [a for a in some if probability[a] / max(probability.values()) >= threshold]
        if kind == "psi":
            return log_sum_exp(np.array([target[a] for a in kept]))
        return target[max(kept, key=lambda a: min(q[b, p, :, a]))]

    sums, n = dict.fromkeys(("qvalue", "cql"), 0.0), 0
    for d in (d for row in decisions_of(rows, gamma, turn_gamma, end_of_action) for d in row if d.trained):
        n += 1
        r = d.reward
        if kind == "psi":
            r = r / reward_scale + log_softmax(logits[d.row, d.at])[d.token]
        y = r + (0.0 if d.over else d.discount * backup(d.row, d.after))
        for one in q[d.row, d.at]:
            u = y - one[d.token]
            sums["qvalue"] += u**2 if kind == "cql" else huber(u)
            sums["cql"] -= log_softmax(one / cql_temperature)[d.token]
    losses = {name: total / max(n, 1) for name, total in sums.items()}
    return losses | {"actor": actor_loss(rows, logits, 1.0, transition_weight, normalizer)}


def qsft_losses(
    rows, logits, target, behavior, *, gamma=0.99, turn_gamma=None, end_of_action=None, value_min=0.0, value_max=1.0,
    threshold=0.0, rest=None, transition_weight=0.0, normalizer="all", forbidden=(), action_length=None,
):  # fmt: skip
    """All outputs; logits of the model, of its ``target`` and of the ``behavior``."""
    vocab = logits.shape[-1]

    def value(b, p):
        allowed = writable(rows, b, p, vocab, (*forbidden, rest), end_of_action, action_length)
        pi, model = np.exp(log_softmax(behavior[b, p])), np.exp(log_softmax(target[b, p]))
        most = max(pi[a] for a in allowed)
        ratio = max(model[a] / pi[a] for a in allowed if pi[a] / most >= threshold)
        return value_min + (value_max - value_min) * min(ratio, 1.0)

    sums, n = dict.fromkeys(("loss_qvalue", "likelihood", "td_target"), 0.0), 0
    for d in (d for row in decisions_of(rows, gamma, turn_gamma, end_of_action) for d in row if d.trained):
        n += 1
        y = d.reward + (0.0 if d.over else d.discount * value(d.row, d.after))
        y = min(max(y, value_min), value_max)
        w = (y - value_min) / (value_max - value_min)
        goal = np.full(vocab, (1 - w) / (vocab - 1)) if rest is None else (1 - w) * np.eye(vocab)[rest]
        goal[d.token] = w
        log_p = log_softmax(logits[d.row, d.at])
        sums["loss_qvalue"] -= (goal * log_p).sum()
        sums["likelihood"] += np.exp(log_p[d.token])
        sums["td_target"] += y
    found = {name: total / max(n, 1) for name, total in sums.items()}
    return found | {"loss_transition": actor_loss(rows, logits, 0.0, transition_weight, normalizer)}


def oreo_losses(
    rows, v, log_prob, ref_log_prob, *, beta=0.03, level="token", end_of_action=None, logits=None,
    transition_weight=0.0, normalizer="all",
):  # fmt: skip
    """All outputs, and what ``loss_actor``'s gradient by each token's log-probability is, ``[B, T]``.

    Both log-probabilities of every token, ``[B, T, V]``.
    """
    sums = dict.fromkeys(("loss_value", "value", "log_ratio", "residual", "loss_kl"), 0.0)
    actor, actions, n, slope = 0.0, 0, 0, np.zeros(v.shape)
    for row in decisions_of(rows, end_of_action=end_of_action):
        ratio = {d.at: (log_prob - ref_log_prob)[d.row, d.at, d.token] for d in row}
        goal, after = {}, None
        for d in reversed(row):
            if after is None:
                after = 0.0 if d.over else v[d.row, d.after]
            after = goal[d.at] = d.reward - beta * ratio[d.at] + after
        begins = None
        for d in row:
            error = v[d.row, d.at] - goal[d.at]
            if begins is None or level == "token":
                begins = d
                if d.trained:
                    actor += error**2
                    actions += 1
            if begins.trained and d.trained:
                slope[d.row, d.at] = 2 * beta * (v[d.row, begins.at] - goal[begins.at])
            if level == "utterance" and d.ends:
                begins = None
            if not d.trained:
                continue
            n += 1
            p, log_p, ref = (table[d.row, d.at] for table in (np.exp(log_prob), log_prob, ref_log_prob))
            kl = sum(p[a] * (log_p[a] - ref[a]) for a in range(len(p)) if p[a] > 0)
            for name, value in zip(sums, (error**2, v[d.row, d.at], ratio[d.at], abs(error), kl), strict=True):
                sums[name] += value
    found = {name: total / max(n, 1) for name, total in sums.items()}
    found |= {"kl": found["loss_kl"], "loss_actor": actor / max(actions, 1)}
    found["loss_transition"] = actor_loss(rows, logits, 0.0, transition_weight, normalizer)
    return found, slope / max(actions, 1)


# -- one value for each utterance --------------------------------------------------------------------------------------


def utterance_ilql_losses(
    rows, v, q, target_q, logits, *, gamma=0.99, expectile=0.7, beta=0.0, weighting="exp", clip=None,
    transition_weight=0.0, normalizer="all", end_of_action=None,
):  # fmt: skip
    """``q`` and ``target_q [B,T,K]``."""
    sums, number, advantage = dict.fromkeys(("value", "qvalue"), 0.0), 0, np.zeros(v.shape)
    for b in range(len(v)):
        found, boot = utterances_of(rows, b, end_of_action)
        states = [utterance[0] - 1 for utterance in found] + [boot]
        for i, utterance in enumerate(found):
            read = utterance[-1] - 1
            u = target_q[b, read].min() - v[b, states[i]]
            advantage[b, [p - 1 for p in utterance]] = u
            if not rows.get("train_mask", rows["agent_mask"])[b, utterance[-1]]:
                continue
            number += 1
            following = 0.0 if i + 1 == len(found) and rows["terminated"][b] else v[b, states[i + 1]]
            goal = sum(rows["token_reward"][b, p] for p in utterance) + gamma * following
            sums["qvalue"] += sum((goal - x) ** 2 for x in q[b, read])
            sums["value"] += (expectile if u >= 0 else 1 - expectile) * u**2
    transition_weight = transition_weight if clip is None else min(transition_weight, clip)
    weights = advantage_weights(advantage, beta, weighting, clip)
    losses = {name: total / max(number, 1) for name, total in sums.items()}
    return losses | {"actor": actor_loss(rows, logits, weights, transition_weight, normalizer)}


def chai_losses(rows, q, candidate_q, candidate_target_q, log_prob, *, gamma=0.99, trained=None, room=None):
    """For lists by row and state: ``q[b][i] [K]`` and ``candidate_q[b][i] [C,K]``.

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


# -- the decision transformer ------------------------------------------------------------------------------------------


def dt_loss(rows, lm, returns, *, transition_weight=0.0, normalizer="all", end_of_action=None):
    """``loss_actor``, from a model's weights and its returns' embedding in float64."""
    tokens, agent, reward = (rows[name] for name in ("tokens", "agent_mask", "token_reward"))
    table = lm.get_input_embeddings().weight.detach().numpy()
    w, bias = returns.weight.detach().numpy(), returns.bias.detach().numpy()
    step = (returns.high - returns.low) / (returns.n_bins - 1)
    logits = np.zeros((*tokens.shape, len(table)))
    for b, length in enumerate(rows["attention_mask"].sum(-1)):
        embedded = table[tokens[b, :length]]
        for p in range(length - 1):
            begins = agent[b, p + 1] and (not agent[b, p] or tokens[b, p] == end_of_action)
            if p == 0 if returns.mode == "constant" else begins:
                value = reward[b, p + 1 : length].sum()
                rounded = returns.low + step * round((value - returns.low) / step)
                embedded[p] += w * (2 * (rounded - returns.low) / (returns.high - returns.low) - 1) + bias
        with torch.no_grad():
            logits[b, :length] = lm(inputs_embeds=torch.from_numpy(embedded)[None]).logits[0].numpy()
    return actor_loss(rows, logits, 1.0, transition_weight, normalizer)
