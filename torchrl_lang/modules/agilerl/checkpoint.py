"""Agents that AgileRL's ILQL trained."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrl_lang._files import FileError, file_errors, non_finite, read_json, read_tensors
from torchrl_lang.modules.agilerl.export import FORMAT, OPTIONS
from torchrl_lang.modules.heads import QValueHead, StackedHeads, ValueHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = (
    "write a folder with `export` of torchrl_lang/modules/agilerl/export.py where AgileRL is installed, and give that"
)
RENAMED = {name: name for name in ("gamma", "transition_weight", "value_min", "value_max")}
RENAMED |= {"tau": "expectile", "beta": "advantage_temperature", "clip_weight": "weight_clip", "dm_margin": "margin"}
RENAMED |= {"detach_v": "detach_value", "detach_q": "detach_qvalue", "detach_pi": "detach_actor"}
RENAMED |= {"cql_temp": "cql_temperature"}
"""Options of AgileRL's ``ILQL`` and their names in :class:`~torchrl_lang.objectives.ILQLLoss`."""
_BLOCK = {name: name for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj")}
_BLOCK |= {"mlp.model.mlp_linear_layer_1": "mlp.c_fc", "mlp.model.mlp_linear_layer_output": "mlp.c_proj"}
_LAYERS = ("linear_layer_1", "layer_norm_1", "linear_layer_2", "layer_norm_2")
_HEAD = {**dict(zip(_LAYERS, ("in", "norm1", "mid", "norm2"), strict=True)), "linear_layer_output": "out"}
_POLICY = dict(zip(_LAYERS, "0134", strict=True))

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
        torchrl_lang._files.readers.FileError: ...checkpoint.pt is a file; AgileRL's checkpoints are pickles, which ...
    """
    folder = Path(folder)
    if folder.is_file():
        raise FileError(folder, "is a file; AgileRL's checkpoints are pickles, which are never read", _REMEDY)
    described = read_json(folder / "agent.json", remedy=_REMEDY)
    weights = read_tensors(folder / "agent.safetensors", remedy=_REMEDY)
    misfits = (KeyError, ValueError, TypeError, RuntimeError, AttributeError)
    with file_errors(folder, "holds no agent as ILQL builds it", _REMEDY, *misfits):
        if (described["format"], described["version"]) != FORMAT:
            raise ValueError(f"agent.json is not of {FORMAT}")
        if wrong := non_finite(weights.items()):
            raise ValueError(f"weights are not finite: {', '.join(wrong[:3])}")
        options = {name: described["options"][name] for name in OPTIONS}
        return agilerl_agent(weights, described["net_config"], options)


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
        warnings.warn("The checkpoint holds the first Q head twice: the second is its target's.", stacklevel=2)
        online[1] = targets[1]
    first, last = (online[0][f"model.mlp_linear_layer_{place}.weight"] for place in ("1", "output"))
    width, vocabulary = first.shape[1], len(last)
    policy, values, target = (
        _lm(_part(weights, name), network, vocabulary, _part(weights, "pi") if name == "actor" else None)
        for name in ("actor", "model", "actor_target")
    )
    qvalue, target_qvalue = (
        _filled(QValueHead(width, vocabulary, n_heads=len(nets), kind="deep"), nets) for nets in (online, targets)
    )
    value = _filled(ValueHead(width, kind="deep"), [_part(weights, "v")])
    training = {"tau": options["alpha"]} | {name: options[name] for name in ("lr", "weight_decay", "batch_size")}
    return AgileRLAgent(policy, values, target, qvalue, value, target_qvalue, renamed(options), training)


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
    from torchrl_lang.modules.agilerl.model import AgileRLConfig, AgileRLForCausalLM, register_agilerl  # transformers

    register_agilerl()
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
        activation=network["activation"],
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


def _filled(head: Kind, networks: list[dict[str, Tensor]]) -> Kind:
    """A head with the weights of its networks, in evaluation mode."""
    stacked = {}
    for theirs, ours in _HEAD.items():
        for end in ("weight", "bias"):
            values = torch.stack([network[f"model.mlp_{theirs}.{end}"] for network in networks])
            stacked[f"{ours}_{end}"] = values.unsqueeze(1) if ours.startswith("norm") else values
    head.load_state_dict(stacked)
    return head.eval()
