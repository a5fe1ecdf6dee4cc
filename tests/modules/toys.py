"""Tiny models, rows and the golden model, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Model, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from torchrl_lang.modules import QValueHead, ValueHead, causal_lm
from torchrl_lang.schema import ControlTokens
from torchrl_lang.text import CharTokenizer

KINDS = ("gpt2", "llama", "qwen2")
TOKENIZER = CharTokenizer.from_alphabet("abcdef")
CONTROL = TOKENIZER.control
WIDTH = 16
GOLDEN_CONTROL = ControlTokens(
    pad=29, end_of_action=30, end_of_state=31, begin_state=32, begin_action=33, end_of_dialogue=34
)


def _lm(kind, seed, vocab_size=TOKENIZER.vocab_size, max_length=40, layers=2, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = {"vocab_size": vocab_size, "layers": layers, "width": WIDTH, "heads": 2, "max_length": max_length}
        return causal_lm(kind, **shape, **options).eval()


def tiny_lm(kind: str = "gpt2", *, seed: int = 0, **shape: int) -> PreTrainedModel:
    """A model with large weights, so that its next-token distributions are far from uniform."""
    extra = {} if kind == "gpt2" else {"num_key_value_heads": 1}  # grouped queries where the kind has them
    lm = _lm(kind, seed, pad=CONTROL.pad, **shape, **extra)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return lm


def without_blocks(model: GPT2Model, inputs_embeds: Tensor, **_: Any) -> BaseModelOutput:
    """GPT-2 from its embeddings to its final norm: Dynamo traces its blocks for seconds."""
    return BaseModelOutput(last_hidden_state=model.ln_f(inputs_embeds))


def use_exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute norms in the precision of their input: transformers computes those of Llama in float32."""
    for norm in (LlamaRMSNorm, MistralRMSNorm, Olmo3RMSNorm, Qwen2RMSNorm):
        forward = lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)  # noqa: E731
        monkeypatch.setattr(norm, "forward", forward)


SLIDING = ("mistral", "gemma3_text", "qwen2", "olmo3")
"""Kinds whose layers, or some of them, see a few tokens back only."""


def sliding_lm(kind: str, **options: Any) -> PreTrainedModel:
    """A model with windows of four tokens, in double precision."""
    mixed = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = {
        "mistral": {"sliding_window": 4},
        "qwen2": mixed | {"use_sliding_window": True},
        "gemma3_text": mixed | {"head_dim": 8},
        "olmo3": mixed,
    }
    return _lm(kind, 0, initializer_range=0.3, **(config[kind] | options)).double()


def heads(seed: int = 0, vocab_size: int = TOKENIZER.vocab_size, kind: str = "mlp") -> tuple[QValueHead, ValueHead]:
    """Heads whose values are of the order of one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        q, v = QValueHead(WIDTH, vocab_size, kind=kind), ValueHead(WIDTH, kind=kind)
    with torch.no_grad():
        for head in (q, v):
            head.out_weight.mul_(60)
    return q, v


def rows(n: int = 7, width: int = 20, longest: int = 12, seed: int = 0) -> TensorDict:
    """Ragged rows of letters, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (n,), generator=generator)
    tokens = torch.randint(6, (n, width), generator=generator)
    attention_mask = torch.arange(width) < length[:, None]
    tokens = tokens.masked_fill(~attention_mask, CONTROL.pad)
    return TensorDict(tokens=tokens, attention_mask=attention_mask, batch_size=[n])


def games(n: int = 6, width: int = 12, seed: int = 0) -> TensorDict:
    """Ragged rows of letters; everybody speaks now and then, the agent ends after at most three tokens."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(5, width + 1, (n,), generator=g)
    attention = torch.arange(width) < length[:, None]
    agent = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0]).bool()[:width] & attention
    tokens = torch.randint(6, (n, width), generator=g)
    tokens[:, [2, 7, 10]] = CONTROL.end_of_action
    return TensorDict(
        tokens=tokens.masked_fill(~attention, CONTROL.pad),
        attention_mask=attention,
        agent_mask=agent,
        token_reward=torch.randn(n, width, generator=g) * agent,
        token_log_prob=-1.5 * torch.rand(n, width, generator=g) * agent,
        advantage=torch.randn(n, 1, 1, generator=g),
        batch_size=[n],
    )


@torch.no_grad()
def of_linears(head, *linears: tuple[torch.Tensor, ...]):
    """The head with ``(weight, bias, weight, bias)`` of each network's two linear layers."""
    parameters = head.in_weight, head.in_bias, head.out_weight, head.out_bias
    for parameter, parts in zip(parameters, zip(*linears, strict=True), strict=True):
        parameter.copy_(torch.stack(parts))
    return head


class Golden:
    """The published model's weights, its inputs and what it computed."""

    def __init__(self) -> None:
        path = Path(__file__).parents[1] / "golden" / "model_shared_lmhead.npz"
        self.arrays = dict(np.load(path))
        self.lm = causal_lm(
            vocab_size=35, layers=2, width=16, heads=2, max_length=80, pad=29, activation_function="gelu_new"
        ).eval()
        prefix = "param/model."
        state = {name[len(prefix) :]: self[name] for name in self.arrays if name.startswith(prefix)}
        self.lm.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]})
        self.value = of_linears(ValueHead(16), self._linears("v"))
        self.qvalue = of_linears(QValueHead(16, 35), self._linears("q"), self._linears("q2"))
        self.target_qvalue = of_linears(QValueHead(16, 35), self._linears("target_q"), self._linears("target_q2"))

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name])

    def _linears(self, name: str) -> tuple[torch.Tensor, ...]:
        return tuple(self[f"param/{name}.{layer}.{what}"] for layer in (0, 2) for what in ("weight", "bias"))
