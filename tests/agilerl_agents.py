"""Agents as AgileRL's ILQL writes them, with random weights, and what they compute, worked out by plain functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang.modules.agilerl.export import OPTIONS

VOCAB, WIDTH, HEADS, LAYERS, INNER, LENGTH = 11, 8, 2, 2, 20, 16
ILQL_OPTIONS = {
    "alpha": 0.02, "batch_size": 4, "beta": 0.7, "clip_weight": 3.0, "cql_temp": 0.8, "detach_pi": False,
    "detach_q": True, "detach_v": False, "dm_margin": 0.1, "double_q": True, "exp_weights": False, "gamma": 0.9,
    "lr": 1e-4, "per_token": True, "tau": 0.8, "transition_weight": 0.2, "value_max": 2.0, "value_min": -3.0,
    "weight_decay": 0.01,
}  # fmt: skip


class FakeILQL(SimpleNamespace):
    """The attributes of AgileRL's ``ILQL`` that are exported."""

    net_config: dict[str, Any]
    weights: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights


def make_agent(
    *, seed: int = 0, vocab: int = VOCAB, embeddings: int = 0, length: int = LENGTH, bias: bool = True, **more: Any
) -> FakeILQL:
    """An agent; ``more`` are options of its constructor and fields of its network."""
    options = ILQL_OPTIONS | {name: value for name, value in more.items() if name in OPTIONS}
    network = {"n_head": HEADS, "activation": "GELU", "layer_norm_eps": 1e-3, "dropout": 0.0}
    network |= {name: value for name, value in more.items() if name not in OPTIONS}
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def linear(name: str, rows: int, *columns: int, bias: bool = True) -> None:
        """With columns; without them the weights of a norm."""
        drawn = torch.randn(rows, *columns, generator=generator)
        weights[f"{name}.weight"] = 0.5 * drawn if columns else 1 + 0.3 * drawn
        if bias:
            weights[f"{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)

    norm = linear

    for gpt in ("model", "actor", "actor_target"):
        linear(f"{gpt}.transformer.wte", embeddings or vocab, WIDTH, bias=False)
        linear(f"{gpt}.transformer.wpe", length, WIDTH, bias=False)
        for block in (f"{gpt}.transformer.h.{i}" for i in range(LAYERS)):
            norm(f"{block}.ln_1", WIDTH, bias=bias)
            linear(f"{block}.attn.c_attn", 3 * WIDTH, WIDTH, bias=bias)
            linear(f"{block}.attn.c_proj", WIDTH, WIDTH, bias=bias)
            norm(f"{block}.ln_2", WIDTH, bias=bias)
            linear(f"{block}.mlp.model.mlp_linear_layer_1", INNER, WIDTH)
            linear(f"{block}.mlp.model.mlp_linear_layer_output", WIDTH, INNER)
        norm(f"{gpt}.transformer.ln_f", WIDTH, bias=bias)
        weights[f"{gpt}.lm_head.weight"] = weights[f"{gpt}.transformer.wte.weight"]
    second = ("q2", "target_q2") if options["double_q"] else ()
    for head in ("v", "q", "target_q", "pi", *second):
        linear(f"{head}.model.mlp_linear_layer_1", 2 * WIDTH, WIDTH)
        norm(f"{head}.model.mlp_layer_norm_1", 2 * WIDTH)
        linear(f"{head}.model.mlp_linear_layer_2", 2 * WIDTH, 2 * WIDTH)
        norm(f"{head}.model.mlp_layer_norm_2", 2 * WIDTH)
        linear(f"{head}.model.mlp_linear_layer_output", 1 if head == "v" else vocab, 2 * WIDTH)
    return FakeILQL(weights=weights, net_config=network, **options)


def states(agent: FakeILQL, gpt: str, tokens: Tensor) -> Tensor:
    """States of one of the three transformers, ``[T] -> [T, H]``, block by block and head by head."""
    weights = {k.removeprefix(f"{gpt}.transformer."): v for k, v in agent.weights.items() if k.startswith(f"{gpt}.")}

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)

    eps, activation = agent.net_config["layer_norm_eps"], getattr(torch.nn, agent.net_config["activation"])()
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: len(tokens)]
    later = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for block in (f"h.{i}" for i in range(LAYERS)):
        query, key, value = linear(f"{block}.attn.c_attn", norm(f"{block}.ln_1", x, eps)).split(WIDTH, -1)
        size, parts = WIDTH // HEADS, []
        for part in (slice(i * size, (i + 1) * size) for i in range(HEADS)):
            scores = (query[:, part] @ key[:, part].T / size**0.5).masked_fill(later, -torch.inf)
            parts.append(scores.softmax(-1) @ value[:, part])
        x = x + linear(f"{block}.attn.c_proj", torch.cat(parts, -1))
        inner = linear(f"{block}.mlp.model.mlp_linear_layer_1", norm(f"{block}.ln_2", x, eps)).relu()
        x = x + activation(linear(f"{block}.mlp.model.mlp_linear_layer_output", inner))
    return norm("ln_f", x, 1e-5)


def outputs(agent: FakeILQL, head: str, x: Tensor) -> Tensor:
    """Outputs of a head."""
    weights = {key.removeprefix(f"{head}.model.mlp_"): value for key, value in agent.weights.items()}
    for layer in ("1", "2"):
        x = F.linear(x, weights[f"linear_layer_{layer}.weight"], weights[f"linear_layer_{layer}.bias"])
        names = weights[f"layer_norm_{layer}.weight"], weights[f"layer_norm_{layer}.bias"]
        x = F.layer_norm(x, (2 * WIDTH,), *names).relu()
    return F.linear(x, weights["linear_layer_output.weight"], weights["linear_layer_output.bias"])
