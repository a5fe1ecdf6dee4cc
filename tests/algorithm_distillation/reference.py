"""An algorithm-distillation model in plain NumPy loops, one context at a time."""

import math

import numpy as np


def weights_of(model):
    return {key: value.detach().double().numpy() for key, value in model.state_dict().items()}


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def layer_norm(w, name, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def embed(w, sizes, observation, action, reward, episode_step):
    """Steps of one context; ``sizes`` are those of the observation's components, actions, episode and context."""
    rows = []
    for t in range(len(action)):
        numbers = [*observation[t], action[t - 1] if t else sizes[-3] - 1, episode_step[t], t]
        total = sum(w["trunk.embedding.table.weight"][sum(sizes[:i]) + n] for i, n in enumerate(numbers))
        real = np.array([reward[t - 1] if t else 0, 0 if t else 1])
        rows.append(total + w["trunk.embedding.reals.weight"] @ real)
    return np.stack(rows)


def attend(query, keys, values):
    score = np.array([query @ key for key in keys]) / math.sqrt(len(query))
    weight = np.exp(score - score.max())
    return (weight / weight.sum()) @ values


def hidden_states(w, layers, heads, x):
    width = x.shape[-1] // heads
    for layer in range(layers):
        name = f"trunk.blocks.{layer}"
        q, k, v = np.split(linear(w, f"{name}.qkv", layer_norm(w, f"{name}.norm_attention", x)), 3, -1)
        seen = np.zeros_like(x)
        for t in range(len(x)):
            for head in range(heads):
                part = slice(head * width, (head + 1) * width)
                seen[t, part] = attend(q[t, part], k[: t + 1, part], v[: t + 1, part])
        x = x + linear(w, f"{name}.projection", seen)
        inner = np.maximum(linear(w, f"{name}.up", layer_norm(w, f"{name}.norm_mlp", x)), 0)
        x = x + linear(w, f"{name}.down", inner)
    return layer_norm(w, "trunk.norm", x)


def log_softmax(x):
    return x - x.max() - math.log(np.exp(x - x.max()).sum())
