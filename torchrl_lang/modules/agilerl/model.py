"""AgileRL's transformer as a Hugging Face model."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Model

from torchrl_lang._checks import check_options

ACTIVATIONS = ("Tanh", "ReLU", "ELU", "Softsign", "Sigmoid", "Softplus", "LeakyReLU", "GELU", "Identity")
"""Activations of AgileRL's networks without weights or random numbers, by their names there and in ``torch.nn``."""


class AgileRLConfig(PreTrainedConfig):
    """Sizes of an :class:`AgileRLForCausalLM`.

    Examples:
        >>> from torchrl_lang.modules.agilerl.model import AgileRLConfig, AgileRLForCausalLM
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
