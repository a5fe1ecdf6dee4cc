"""Shapes of language models with their numbers of weights, and figures of cards. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchrl_lang.recipes.options import near


@dataclass(frozen=True)
class Architecture:
    """The shape of a causal language model: a stack of ``L`` blocks of attention and an MLP.

    Letters in the formulas of this module and of ``costs``: ``L`` layers, ``H`` width, ``A`` the width of all query
    heads together, ``K`` that of all key heads, ``F`` the inner width of the MLP, ``V`` the vocabulary.

    Examples:
        >>> from torchrl_lang.recipes.planning.architectures import ARCHITECTURES
        >>> model = ARCHITECTURES["Qwen2.5-7B"]
        >>> model.queries, model.keys, f"{model.parameters:,}"
        (3584, 512, '7,615,616,512')
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_width: int
    tied: bool = True
    """The output layer is the embedding."""
    kind: Literal["gpt2", "llama", "gemma"] = "llama"
    """gpt2: an MLP of two matrices, layer norms, learned positions and biases everywhere. llama: an MLP of three, RMS
    norms. gemma: two more norms in a block, computed in float32."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalized, head by head."""
    positions: int = 0
    """Learned positions."""

    @property
    def queries(self) -> int:
        """``A``."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """``K``, which is that of the values as well."""
        return self.kv_heads * self.head_width

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block."""
        h, a, k, f = self.width, self.queries, self.keys, self.ffn
        if self.kind == "gpt2":
            return [(h, a + 2 * k), (a, h), (h, f), (f, h)]
        return [(h, a), (h, k), (h, k), (a, h), (h, f), (h, f), (f, h)]

    @property
    def matrices(self) -> int:
        """Weights of the linear layers of a block: ``2 A H + 2 K H + 3 F H``, of gpt2 ``2 F H`` in place of ``3``."""
        return sum(rows * columns for rows, columns in self.linears)

    @property
    def norms(self) -> int:
        """Norms of a block, beside those of queries and keys."""
        return 4 if self.kind == "gemma" else 2

    @property
    def block(self) -> int:
        """All weights of a block."""
        biases = self.queries + 2 * self.keys if self.qkv_bias else 0
        if self.kind == "gpt2":  # of the linear layers and of the norms
            biases = sum(outputs for _, outputs in self.linears) + self.norms * self.width
        return self.matrices + biases + self.norms * self.width + 2 * self.head_width * self.qk_norm

    @property
    def table(self) -> int:
        """``V H``, the weights of the embedding."""
        return self.vocab * self.width

    @property
    def final_norm(self) -> int:
        """Weights of the norm before the head."""
        return self.width * (2 if self.kind == "gpt2" else 1)

    @property
    def parameters(self) -> int:
        """All weights: ``L`` blocks, the embedding (twice where it is not tied), positions and the last norm."""
        tables = self.table * (1 if self.tied else 2) + self.positions * self.width
        return self.layers * self.block + tables + self.final_norm


def _gpt2(layers: int, width: int, heads: int) -> Architecture:
    sizes: Any = {"heads": heads, "kv_heads": heads, "head_width": width // heads, "ffn": 4 * width}
    return Architecture(layers, width, vocab=50_257, positions=1024, kind="gpt2", **sizes)


def _qwen25(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152_064, tied: bool = False
) -> Architecture:
    return Architecture(layers, width, heads, kv_heads, ffn, vocab, width // heads, tied, qkv_bias=True)


def _qwen3(layers: int, width: int, heads: int, ffn: int, tied: bool) -> Architecture:
    return Architecture(layers, width, heads, 8, ffn, 151_936, 128, tied, qk_norm=True)


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int = 128_256, tied: bool = False
) -> Architecture:
    return Architecture(layers, width, heads, kv_heads, ffn, vocab, width // heads, tied)


def _gemma3(
    layers: int, width: int, heads: int, kv_heads: int, ffn: int, head_width: int, vocab: int = 262_208
) -> Architecture:
    return Architecture(layers, width, heads, kv_heads, ffn, vocab, head_width, kind="gemma", qk_norm=True)


ARCHITECTURES: Mapping[str, Architecture] = {
    "GPT-2": _gpt2(12, 768, 12),
    "GPT-2-medium": _gpt2(24, 1024, 16),
    "GPT-2-large": _gpt2(36, 1280, 20),
    "GPT-2-XL": _gpt2(48, 1600, 25),
    "SmolLM2-135M": _llama(30, 576, 9, 3, 1536, 49_152, True),
    "SmolLM2-360M": _llama(32, 960, 15, 5, 2560, 49_152, True),
    "SmolLM2-1.7B": _llama(24, 2048, 32, 32, 8192, 49_152, True),
    "Qwen2.5-0.5B": _qwen25(24, 896, 14, 2, 4864, 151_936, True),
    "Qwen2.5-1.5B": _qwen25(28, 1536, 12, 2, 8960, 151_936, True),
    "Qwen2.5-3B": _qwen25(36, 2048, 16, 2, 11_008, 151_936, True),
    "Qwen2.5-7B": _qwen25(28, 3584, 28, 4, 18_944),
    "Qwen2.5-14B": _qwen25(48, 5120, 40, 8, 13_824),
    "Qwen2.5-32B": _qwen25(64, 5120, 40, 8, 27_648),
    "Qwen2.5-72B": _qwen25(80, 8192, 64, 8, 29_568),
    "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 9728, True),
    "Qwen3-8B": _qwen3(36, 4096, 32, 12_288, False),
    "Qwen3-14B": _qwen3(40, 5120, 40, 17_408, False),
    "Qwen3-32B": _qwen3(64, 5120, 64, 25_600, False),
    "Llama-3.2-1B": _llama(16, 2048, 32, 8, 8192, tied=True),
    "Llama-3.2-3B": _llama(28, 3072, 24, 8, 8192, tied=True),
    "Llama-3.1-8B": _llama(32, 4096, 32, 8, 14_336),
    "Llama-3.1-70B": _llama(80, 8192, 64, 8, 28_672),
    "Mistral-7B-v0.3": _llama(32, 4096, 32, 8, 14_336, 32_768),
    "Gemma-3-1B": _gemma3(26, 1152, 4, 1, 6912, 256, 262_144),
    "Gemma-3-4B": _gemma3(34, 2560, 8, 4, 10_240, 256),
    "Gemma-3-27B": _gemma3(62, 5376, 32, 16, 21_504, 128),
}
"""Public configurations; Gemma's are those of the text models."""


TYPICAL = ("GPT-2", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
"""Models from 0.1 to 70 B parameters."""


def find_architecture(name: str) -> Architecture:
    """The architecture of a name in the table, whatever its case, or of a Hugging Face model's folder.

    Raises:
        ValueError: there is neither.
        FileError: the folder's ``config.json`` is damaged.
    """
    if (Path(name) / "config.json").is_file():
        return of_folder(Path(name))
    found = {known.lower(): shape for known, shape in ARCHITECTURES.items()}
    short = name.rpartition("/")[2].lower().removesuffix("-instruct")
    if short not in found:
        advice = "Give a folder with a config.json, numbers (--layers, --width, ...), --params, or one of"
        raise ValueError(f"No --model {name} is known{near(name, ARCHITECTURES)} {advice} {', '.join(ARCHITECTURES)}.")
    return found[short]


def of_folder(folder: Path) -> Architecture:
    """The architecture that the ``config.json`` of a Hugging Face model describes.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.recipes.planning.architectures import ARCHITECTURES, of_folder
        >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = pathlib.Path(home, "config.json").write_text(json.dumps(config))
        ...     of_folder(pathlib.Path(home)) == ARCHITECTURES["GPT-2"]
        True
    """
    from torchrl_lang._files import file_errors, read_json

    path, remedy = folder / "config.json", "give a folder of a causal language model, or its numbers"
    read = read_json(path, remedy=remedy)
    with file_errors(path, "describes no model whose shape is known", remedy, KeyError, TypeError, ValueError):
        return _of_config(read.get("text_config", read))


def _of_config(config: Mapping[str, Any]) -> Architecture:
    kind = str(config["model_type"])
    if kind == "gpt2":
        shape = _gpt2(config["n_layer"], config["n_embd"], config["n_head"])
        inner = config.get("n_inner") or shape.ffn
        sizes = {"ffn": inner, "vocab": config["vocab_size"], "positions": config.get("n_positions", 1024)}
        return Architecture(**{**vars(shape), **sizes})
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return Architecture(
        layers=config["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        head_width=config.get("head_dim") or width // heads,
        tied=config.get("tie_word_embeddings", kind.startswith("gemma")),
        kind="gemma" if kind.startswith("gemma") else "llama",
        qkv_bias=kind.startswith("qwen2") or bool(config.get("attention_bias")),
        qk_norm=kind.startswith(("qwen3", "gemma3")),
    )


def of_size(parameters: float, vocab: int) -> Architecture:
    """An architecture of about as many parameters: that of the table which is nearest in size, wider or narrower.

    The weights of blocks are in proportion to the square of all widths.

    Examples:
        >>> from torchrl_lang.recipes.planning.architectures import of_size
        >>> model = of_size(5e9, vocab=32_000)
        >>> model.layers, model.width, f"{model.parameters / 1e9:.2f}"
        (36, 3008, '5.07')
    """
    like = min(ARCHITECTURES.values(), key=lambda model: abs(model.parameters - parameters))
    tables = vocab * like.width * (1 if like.tied else 2)
    scale = (max(parameters - tables, parameters / 3) / (like.layers * like.block)) ** 0.5
    width, ffn = (max(round(size * scale / 64), 1) * 64 for size in (like.width, like.ffn))
    sizes: Any = {"width": width, "ffn": ffn, "head_width": max(round(like.head_width * scale), 1), "vocab": vocab}
    return Architecture(**{**vars(like), **sizes})


class Card(NamedTuple):
    """The rates that a processor reaches at best, of dense matrices."""

    memory: float
    """Bytes."""
    flops: float
    """Products and sums a second in half precision."""
    float32: float
    """Likewise in float32, without TF32."""
    bandwidth: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second, one way, to another card in the same machine."""
    latency: float
    """Seconds that an eager block of a model takes at least, forward."""
    attention: float = 1.0
    """Share of the rate of products that attention to half a row reaches."""
    elementwise: float = 1.0
    """Share of the bandwidth that elementwise operations reach."""
    new_memory: float = 1.0
    """Share of the bandwidth for memory that a process has not written before: a CPU maps its pages first."""


CARDS: Mapping[str, Card] = {
    "H200": Card(141e9, 989e12, 67e12, 4.8e12, 450e9, 2e-4),
    "H100": Card(80e9, 989e12, 67e12, 3.35e12, 450e9, 2e-4),
    "A100-80": Card(80e9, 312e12, 19.5e12, 2.04e12, 300e9, 2e-4),
    "A100-40": Card(40e9, 312e12, 19.5e12, 1.555e12, 300e9, 2e-4),
    "L40S": Card(48e9, 362e12, 91.6e12, 0.864e12, 32e9, 2e-4),
    "RTX-4090": Card(24e9, 165e12, 82.6e12, 1.008e12, 32e9, 2e-4),
    "CPU-core": Card(64e9, 480e9, 225e9, 36e9, 10e9, 0.0, attention=1 / 8, elementwise=0.22, new_memory=0.11),
}
"""From the makers' data sheets; the core of a server's processor (AMD EPYC with AVX-512) was measured."""
