"""Agents that AgileRL's ILQL trained, as models and heads of this library."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_lang._files import Fields, FileError, non_finite, read_tensors
from torchrl_lang.modules.agilerl.export import OPTIONS
from torchrl_lang.modules.agilerl.gpt import ACTIVATIONS, AgileRLConfig, AgileRLForCausalLM, register_agilerl
from torchrl_lang.modules.qvalue_head import QValueHead
from torchrl_lang.modules.stacked_heads import StackedHeads
from torchrl_lang.modules.value_head import ValueHead

__all__ = ["RENAMED", "AgileRLAgent", "agilerl_agent", "read_agilerl", "renamed"]

_REMEDY = (
    "write a folder with `export` of torchrl_lang/modules/agilerl/export.py where AgileRL is installed, and give that"
)
RENAMED = {
    "gamma": "gamma",
    "tau": "expectile",
    "beta": "advantage_temperature",
    "clip_weight": "weight_clip",
    "transition_weight": "transition_weight",
    "value_min": "value_min",
    "value_max": "value_max",
    "detach_v": "detach_value",
    "detach_q": "detach_qvalue",
    "detach_pi": "detach_actor",
    "dm_margin": "margin",
    "cql_temp": "cql_temperature",
}
"""Options of AgileRL's ``ILQL`` and their names in :class:`~torchrl_lang.objectives.ILQLLoss`."""
_NETWORK: dict[str, type] = {"n_head": int, "activation": str, "layer_norm_eps": float, "dropout": float}
_BLOCK = {
    "ln_1": "ln_1",
    "ln_2": "ln_2",
    "attn.c_attn": "attn.c_attn",
    "attn.c_proj": "attn.c_proj",
    "mlp.model.mlp_linear_layer_1": "mlp.c_fc",
    "mlp.model.mlp_linear_layer_output": "mlp.c_proj",
}
_HEAD = {
    "linear_layer_1": "in",
    "layer_norm_1": "norm1",
    "linear_layer_2": "mid",
    "layer_norm_2": "norm2",
    "linear_layer_output": "out",
}
_POLICY = {"linear_layer_1": "0", "layer_norm_1": "1", "linear_layer_2": "3", "layer_norm_2": "4"}

Weights = Mapping[str, Tensor]
Kind = TypeVar("Kind", bound=StackedHeads)


class AgileRLAgent(NamedTuple):
    """The result of :func:`read_agilerl`: three transformers and the heads that read them, in evaluation mode."""

    policy: PreTrainedModel
    """The language model that acts: AgileRL's ``actor`` with the head ``pi``."""
    values: PreTrainedModel
    """The trunk of ``qvalue`` and ``value``: AgileRL's ``model``."""
    target: PreTrainedModel
    """The trunk of ``target_qvalue``: AgileRL's ``actor_target``."""
    qvalue: QValueHead
    value: ValueHead
    target_qvalue: QValueHead
    options: dict[str, Any]
    """AgileRL's options by the names that :class:`~torchrl_lang.objectives.ILQLLoss` gives them."""
    training: dict[str, float]
    """``tau`` of the target's soft updates (AgileRL's ``alpha``), ``lr``, ``weight_decay`` and ``batch_size``."""


def read_agilerl(folder: str | Path) -> AgileRLAgent:
    """Read an agent of AgileRL's ILQL that ``export`` of ``torchrl_lang/modules/agilerl/export.py`` wrote.

    AgileRL's own checkpoints are pickles of the whole dataset, which are not read: reading them can run any code.

    Args:
        folder: has ``agent.safetensors`` and ``agent.json``.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: a file is given, such as AgileRL's checkpoint; or a file is missing or damaged, or is not of an agent
            of ILQL with the heads that its constructor builds.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.modules import read_agilerl
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = (pathlib.Path(home) / "checkpoint.pt").write_bytes(b"")
        ...     read_agilerl(f"{home}/checkpoint.pt")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: ...checkpoint.pt is a file; AgileRL's checkpoints are pickles, which ...
    """
    folder = Path(folder)
    if folder.is_file():
        raise FileError(folder, "is a file; AgileRL's checkpoints are pickles, which are never read", _REMEDY)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: {_REMEDY}.")
    described = Fields.read(folder / "agent.json", remedy=_REMEDY)
    if described.content.get("format") != "AgileRL ILQL" or described.content.get("version") != 1:
        raise described.error("does not describe an agent of AgileRL's ILQL")
    network, options = described.object("net_config"), described.object("options")
    sizes: dict[str, Any] = {name: network.take(name, kind) for name, kind in _NETWORK.items()}
    missing = sorted(set(OPTIONS) - options.content.keys())
    if missing:
        raise options.error(f"lacks the options {missing}")
    weights = read_tensors(folder / "agent.safetensors", remedy=_REMEDY)
    if wrong := non_finite(weights.items()):
        raise FileError(folder, f"holds weights that are not finite: {', '.join(wrong[:3])}", _REMEDY)
    try:
        return agilerl_agent(weights, sizes, options.content)
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise FileError(folder, f"holds no agent as ILQL builds it ({error})", _REMEDY) from error


def agilerl_agent(weights: Weights, network: Mapping[str, Any], options: Mapping[str, Any]) -> AgileRLAgent:
    """The agent of a ``state_dict`` of AgileRL's ILQL.

    Args:
        weights: ``ilql.state_dict()``.
        network: ``ilql.net_config``, of which ``n_head``, ``activation``, ``layer_norm_eps`` and ``dropout`` are read.
        options: attributes of ``ilql`` by name, such as ``gamma``.

    Raises:
        ValueError: the weights are not those that ``ILQL`` builds.
    """
    qvalues = ["q", "q2"] if options["double_q"] else ["q"]
    online = [_part(weights, name) for name in qvalues]
    targets = [_part(weights, f"target_{name}") for name in qvalues]
    if options["double_q"] and _equal(*online) and not _equal(*targets):
        warnings.warn(
            "AgileRL's checkpoints hold the first Q head twice in place of the second: its target head stands in.",
            stacklevel=2,
        )
        online[1] = targets[1]
    value, vocabulary = [_part(weights, "v")], _sizes(online[0])[1]
    return AgileRLAgent(
        _lm(_part(weights, "actor"), network, vocabulary, _part(weights, "pi")),
        _lm(_part(weights, "model"), network, vocabulary),
        _lm(_part(weights, "actor_target"), network, vocabulary),
        _filled(QValueHead(*_sizes(online[0]), n_heads=len(online), kind="deep"), online),
        _filled(ValueHead(_sizes(value[0])[0], kind="deep"), value),
        _filled(QValueHead(*_sizes(targets[0]), n_heads=len(targets), kind="deep"), targets),
        renamed(options),
        {"tau": options["alpha"]} | {name: options[name] for name in ("lr", "weight_decay", "batch_size")},
    )


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of AgileRL's ``ILQL`` by the names that ILQLLoss gives them; others, which it has not, are left out."""
    new = {RENAMED[name]: value for name, value in options.items() if name in RENAMED}
    if "exp_weights" in options:
        new["advantage_weighting"] = "exp" if options["exp_weights"] else "sign"
    return new


def _part(weights: Weights, name: str) -> dict[str, Tensor]:
    """The tensors of one of the agent's networks, by their names in it."""
    found = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
    if not found:
        raise ValueError(f"there is no network {name!r}")
    return found


def _equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(value, other[key]) for key, value in one.items())


def _lm(weights: Weights, network: Mapping[str, Any], vocab_size: int, head: Weights | None = None) -> PreTrainedModel:
    """A transformer with the tokenizer's embeddings; with ``head``, the weights of the policy's head, as a policy."""
    register_agilerl()
    activation = network["activation"]
    if activation not in ACTIVATIONS:
        raise ValueError(f"its activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    embeddings, width = weights["transformer.wte.weight"].shape
    if embeddings < vocab_size:
        raise ValueError(f"it has {embeddings} embeddings for {vocab_size} tokens")
    layers = len({key.split(".")[2] for key in weights if key.startswith("transformer.h.")})
    config = AgileRLConfig(
        vocab_size=vocab_size,
        max_position_embeddings=len(weights["transformer.wpe.weight"]),
        n_embd=width,
        hidden_size=width if head is None else 2 * width,
        n_inner=len(weights["transformer.h.0.mlp.model.mlp_linear_layer_1.weight"]),
        num_hidden_layers=layers,
        num_attention_heads=network["n_head"],
        activation=activation,
        layer_norm_epsilon=network["layer_norm_eps"],
        dropout=network["dropout"],
        tie_word_embeddings=head is None,
    )
    with torch.device("meta"):
        lm = AgileRLForCausalLM(config)
    new = {f"transformer.gpt.{key}": value for key, value in _gpt(weights, layers).items()}
    new["transformer.gpt.wte.weight"] = new["transformer.gpt.wte.weight"][:vocab_size]
    if head is None:
        new["lm_head.weight"] = new["transformer.gpt.wte.weight"]
    else:
        parts = {ours: f"model.mlp_{theirs}" for theirs, ours in _POLICY.items()}
        for end in ("weight", "bias"):
            new |= {f"transformer.policy.{ours}.{end}": head[f"{theirs}.{end}"] for ours, theirs in parts.items()}
            new[f"lm_head.{end}"] = head[f"model.mlp_linear_layer_output.{end}"]
    lm.load_state_dict({key: value.clone().contiguous() for key, value in new.items()}, assign=True)
    lm.tie_weights()
    return lm.eval()


def _gpt(weights: Weights, layers: int) -> dict[str, Tensor]:
    """The transformer's weights by GPT-2's names; its linear layers are transposed there, and have biases."""
    names = {f"transformer.h.{i}.{theirs}": f"h.{i}.{ours}" for i in range(layers) for theirs, ours in _BLOCK.items()}
    new = {f"{name}.weight": weights[f"transformer.{name}.weight"] for name in ("wte", "wpe")}
    for theirs, ours in {**names, "transformer.ln_f": "ln_f"}.items():
        weight = weights[f"{theirs}.weight"]
        new[f"{ours}.weight"] = weight if weight.ndim == 1 else weight.mT
        new[f"{ours}.bias"] = weights.get(f"{theirs}.bias", weight.new_zeros(len(weight)))
    return new


def _sizes(head: Weights) -> tuple[int, int]:
    """``H`` and the number of outputs."""
    return head["model.mlp_linear_layer_1.weight"].shape[1], len(head["model.mlp_linear_layer_output.weight"])


def _filled(head: Kind, networks: list[dict[str, Tensor]]) -> Kind:
    """A head with the weights of its networks, in evaluation mode."""
    stacked = {}
    for theirs, ours in _HEAD.items():
        for end in ("weight", "bias"):
            values = torch.stack([network[f"model.mlp_{theirs}.{end}"] for network in networks])
            stacked[f"{ours}_{end}"] = values.unsqueeze(1) if ours.startswith("norm") else values
    head.load_state_dict(stacked)
    return head.eval()
