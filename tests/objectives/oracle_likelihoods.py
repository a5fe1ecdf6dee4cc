"""Q-SFT and OREO by plain loops over single decisions in float64."""

from __future__ import annotations

import numpy as np

from tests.objectives.oracle import decisions_of
from tests.objectives.oracle_qbackup import log_softmax, slot_after


def parts_of(rows):
    """The entries of the rows, and whether each token is trained on."""
    train = rows.get("train_mask", np.ones_like(rows["agent_mask"]))
    names = ("tokens", "attention_mask", "agent_mask", "token_reward")
    return *(rows[name] for name in names), rows["terminated"][:, 0], train


def ends_turn(agent_mask, tokens, b, p, last, end):
    """Whether the token after ``p`` is the last one of its utterance."""
    written_on = p + 2 <= last and not agent_mask[b, p + 2]
    return written_on or (end is not None and tokens[b, p + 1] == end)


def environment_loss(rows, logits, transition_weight, normalizer):
    """The cross-entropy of the tokens that the environment wrote."""
    tokens, attention, agent_mask, _, _, train = parts_of(rows)
    total, real, agent = 0.0, 0, 0
    for b in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if not attention[b, t] or (agent_mask[b, t] and not train[b, t]):
                continue
            real += 1
            agent += bool(agent_mask[b, t])
            if not agent_mask[b, t]:
                total -= transition_weight * log_softmax(logits[b, t - 1])[tokens[b, t]]
    return total / max(real if normalizer == "all" else agent, 1)


def qsft_losses(
    rows, logits, target, behavior, *, gamma=0.99, turn_gamma=None, end_of_action=None, value_min=0.0, value_max=1.0,
    threshold=0.0, rest=None, transition_weight=0.0, normalizer="all", forbidden=(), action_length=None,
):  # fmt: skip
    """All outputs. ``logits``, those of the ``target`` model and of the ``behavior``: float64 ``[B, T, V]``."""
    tokens, attention, agent_mask, reward, terminated, train = parts_of(rows)
    vocab = logits.shape[-1]

    def value(b, p):
        allowed = [a for a in range(vocab) if a not in forbidden and a != rest]
        if action_length is not None and slot_after(tokens[b], agent_mask[b], p, end_of_action) >= action_length - 1:
            allowed = [end_of_action]
        pi, model = np.exp(log_softmax(behavior[b, p])), np.exp(log_softmax(target[b, p]))
        most = max(pi[a] for a in allowed)
        ratio = max(model[a] / pi[a] for a in allowed if pi[a] / most >= threshold)
        return value_min + (value_max - value_min) * min(ratio, 1.0)

    total, likelihood, targets, n = 0.0, 0.0, 0.0, 0
    for b in range(tokens.shape[0]):
        positions, last = decisions_of(agent_mask, attention, b)
        states = [*positions, last]
        for j, p in enumerate(positions):
            if not train[b, p + 1]:
                continue
            n += 1
            a, y = tokens[b, p + 1], reward[b, p + 1]
            if not (j == len(positions) - 1 and terminated[b]):
                across = turn_gamma is not None and ends_turn(agent_mask, tokens, b, p, last, end_of_action)
                y += (turn_gamma if across else gamma) * value(b, states[j + 1])
            y = min(max(y, value_min), value_max)
            w = (y - value_min) / (value_max - value_min)
            goal = np.zeros(vocab)
            if rest is None:
                goal[:] = (1 - w) / (vocab - 1)
                goal[a] = w
            else:
                goal[rest], goal[a] = 1 - w, w
            log_p = log_softmax(logits[b, p])
            total -= (goal * log_p).sum()
            likelihood += np.exp(log_p[a])
            targets += y
    return {
        "loss_qvalue": total / max(n, 1),
        "loss_transition": environment_loss(rows, logits, transition_weight, normalizer),
        "likelihood": likelihood / max(n, 1),
        "td_target": targets / max(n, 1),
    }


def oreo_losses(
    rows, v, log_prob, ref_log_prob, *, beta=0.03, level="token", end_of_action=None, logits=None,
    transition_weight=0.0, normalizer="all",
):  # fmt: skip
    """All outputs, unweighted, and what ``loss_actor``'s gradient by each token's log-probability is, ``[B, T]``.

    ``v`` float64 ``[B, T]``; both log-probabilities of every token, ``[B, T, V]``.
    """
    tokens, attention, agent_mask, reward, terminated, train = parts_of(rows)
    sums = dict.fromkeys(("loss_value", "value", "log_ratio", "residual", "loss_kl"), 0.0)
    actor, actions, n = 0.0, 0, 0
    slope = np.zeros(tokens.shape)
    for b in range(tokens.shape[0]):
        positions, last = decisions_of(agent_mask, attention, b)
        ratio = [log_prob[b, p, tokens[b, p + 1]] - ref_log_prob[b, p, tokens[b, p + 1]] for p in positions]
        after = 0.0 if terminated[b] else v[b, last]
        goal = {}
        for p, own in reversed(list(zip(positions, ratio, strict=True))):
            after = goal[p] = reward[b, p + 1] - beta * own + after
        begins = None
        for j, p in enumerate(positions):
            if begins is None or level == "token":
                begins = p
            counted = train[b, begins + 1]
            if begins == p and counted:
                actor += (v[b, p] - goal[p]) ** 2
                actions += 1
            if counted and train[b, p + 1]:
                slope[b, p] = 2 * beta * (v[b, begins] - goal[begins])
            if level == "utterance" and ends_turn(agent_mask, tokens, b, p, last, end_of_action):
                begins = None
            if not train[b, p + 1]:
                continue
            n += 1
            sums["loss_value"] += (v[b, p] - goal[p]) ** 2
            sums["residual"] += abs(v[b, p] - goal[p])
            sums["value"] += v[b, p]
            sums["log_ratio"] += ratio[j]
            p_all = np.exp(log_prob[b, p])
            sums["loss_kl"] += sum(
                p_all[a] * (log_prob[b, p, a] - ref_log_prob[b, p, a]) for a in range(len(p_all)) if p_all[a] > 0
            )
    found = {name: total / max(n, 1) for name, total in sums.items()}
    found |= {"kl": found["loss_kl"], "loss_actor": actor / max(actions, 1)}
    if logits is not None:
        found["loss_transition"] = environment_loss(rows, logits, transition_weight, normalizer)
    return found, slope / max(actions, 1)
