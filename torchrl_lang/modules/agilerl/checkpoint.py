"""AgileRL's transformer as a Hugging Face model, and agents that its ILQL trained."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Model

from torchrl_lang._checks import check_options
from torchrl_lang._files import FileError, file_errors, non_finite, read_json, read_tensors
from torchrl_lang.modules.agilerl.export import FORMAT, OPTIONS
from torchrl_lang.modules.heads import QValueHead, StackedHeads, ValueHead

ACTIVATIONS = ("Tanh", "ReLU", "ELU", "Softsign", "Sigmoid", "Softplus", "LeakyReLU", "GELU", "Identity")
"""Activations of AgileRL's networks without weights or random numbers, by their names there and in ``torch.nn``."""


class AgileRLConfig(PreTrainedConfig):
    """Sizes of an :class:`AgileRLForCausalLM`.

    Examples:
        >>> from torchrl_lang.modules.agilerl.checkpoint import AgileRLConfig, AgileRLForCausalLM
        >>> shape = {"vocab_size": 11, "n_embd": 8, "n_inner": 32, "max_position_embeddings": 16}
        >>> lm = AgileRLForCausalLM(AgileRLConfig(**shape, num_hidden_layers=1, num_attention_heads=2, hidden_size=16))
        >>> lm.lm_head
        Linear(in_features=16, out_features=11, bias=True)
    """

    model_type = "agilerl_gpt"

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    n_embd: int = 768
    """Width of the transformer."""
    hidden_size: int = 768
    """Width of the states that the head reads: ``n_embd``, or twice that after the policy's hidden layers."""
    n_inner: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    activation: str = "GELU"
    layer_norm_epsilon: float = 1e-5
    dropout: float | int = 0.0
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False


class _MLP(GPT2MLP):
    """``act(W2 relu(W1 x))``: AgileRL takes ``activation`` for that of the output."""

    def __init__(self, inner: int, config: GPT2Config, activation: str) -> None:
        super().__init__(inner, config)
        self.act = nn.ReLU()
        self.output_act = getattr(nn, activation)()

    def forward(self, hidden_states: Any) -> Any:
        return self.dropout(self.output_act(self.c_proj(self.act(self.c_fc(hidden_states)))))


class _PreTrained(PreTrainedModel):
    config_class = AgileRLConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["GPT2Block"]


class AgileRLModel(_PreTrained):
    """AgileRL's ``EvolvableGPT`` without its head: GPT-2 in which each block ends in an activation.

    A block adds ``act(W2 relu(W1 LN(x)))`` where GPT-2 adds ``W2 gelu(W1 LN(x))``, so GPT-2's weights mean something
    else in it. With ``hidden_size = 2 n_embd`` the two hidden layers of AgileRL's policy head follow, ``relu(LN(W x))``
    each, so that what remains of that head is linear.
    """

    def __init__(self, config: AgileRLConfig) -> None:
        super().__init__(config)
        check_options(activation=(config.activation, ACTIVATIONS))
        same = ("vocab_size", "n_embd", "n_inner", "layer_norm_epsilon", "initializer_range")
        sizes: dict[str, Any] = {name: getattr(config, name) for name in same}
        inner = GPT2Config(
            n_positions=config.max_position_embeddings,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=config._attn_implementation,
            **sizes,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        )
        self.gpt = GPT2Model(inner)
        self.gpt.ln_f.eps = 1e-5  # whatever the other norms have
        for block in self.gpt.h:
            block.mlp = _MLP(config.n_inner, inner, config.activation)
        width = config.hidden_size
        layers = [config.n_embd, width, width] if width != config.n_embd else []
        self.policy = nn.Sequential(
            *(module for i, o in pairwise(layers) for module in (nn.Linear(i, o), nn.LayerNorm(o), nn.ReLU()))
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.gpt.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.gpt.wte = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As :class:`transformers.GPT2Model`."""
        out = self.gpt(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(self.policy(out.last_hidden_state), past_key_values=out.past_key_values)


class AgileRLForCausalLM(_PreTrained):
    """AgileRL's transformer with a linear head: its policy, or a trunk of its values with the tied embedding."""

    _tied_weights_keys = {"lm_head.weight": "transformer.gpt.wte.weight"}

    def __init__(self, config: AgileRLConfig) -> None:
        super().__init__(config)
        self.transformer = AgileRLModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=not config.tie_word_embeddings)
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """Logits ``[N, T, V]``; the arguments are those of :class:`AgileRLModel`."""
        out = self.transformer(*args, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values)


def register_agilerl() -> None:
    """Let transformers build these models from their configurations in this process."""
    AutoConfig.register(AgileRLConfig.model_type, AgileRLConfig, exist_ok=True)
    AutoModelForCausalLM.register(AgileRLConfig, AgileRLForCausalLM, exist_ok=True)


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
