"""The options of ``plan``, and what an algorithm needs beside its policy. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from torchrl_lang.recipes.algorithms import ALGORITHMS
from torchrl_lang.recipes.options import Options, near, option
from torchrl_lang.recipes.planning.architectures import CARDS, Architecture, Card, find_architecture, of_size

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.52}
"""Of a number; 4-bit weights (NF4) have scales, too."""
GB = 1e9

_LARGE_VOCABULARY = 16_384
_OTHER_MACHINES = 50e9
"""Bytes a second to cards of other machines: a network of 400 Gbit/s for each card."""


class Method(NamedTuple):
    """The models and heads of an algorithm beside the policy, and the passes that it makes in a step."""

    qvalue: bool = False
    """Q heads with a value for each token, and target heads."""
    scalars: int = 0
    """Further heads with one output."""
    scalar_targets: int = 0
    """Target copies of these."""
    reference: bool = False
    target_model: bool = False
    """A copy of the model as target."""
    critic: bool = False
    """A trunk of its own, and a target copy of it."""
    forwards: int = 0
    """Further forward passes in a step, of references and targets."""
    scored: bool = False
    """Log-probabilities in pieces that the backward pass computes again, instead of the chunked cross-entropy."""
    tables: bool = False
    """Backups over the vocabulary."""
    trains: bool = True
    """The language model is trained."""


_IMITATION, _ILQL, _BACKUP = Method(), Method(qvalue=True, scalars=1), Method(qvalue=True, tables=True)
_PREFERENCE = Method(reference=True, forwards=1, scored=True)
_POLICY, _CRITIC = Method(reference=True, scored=True), Method(reference=True, scalars=1, scored=True)
METHODS: Mapping[str, Method] = {
    **dict.fromkeys(("bc", "percent-bc", "dt"), _IMITATION),
    **dict.fromkeys(("ilql", "single-step", "monte-carlo", "awac", "paper-ilql"), _ILQL),
    **dict.fromkeys(("cql", "bcq", "psi"), _BACKUP),
    "qsft": Method(reference=True, target_model=True, forwards=2, scored=True, tables=True),
    "oreo": Method(reference=True, scalars=1, forwards=1, scored=True),
    **dict.fromkeys(("dpo", "ipo"), _PREFERENCE),
    "kto": _PREFERENCE._replace(forwards=3),
    "chai": Method(scalars=2, scalar_targets=2, trains=False),
    "utterance-ilql": Method(scalars=3, scalar_targets=2),
    **dict.fromkeys(("ppo", "turn-ppo"), _CRITIC),
    **dict.fromkeys(("grpo", "dr-grpo", "rloo", "reinforce++", "dapo", "gspo", "cispo", "gigpo"), _POLICY),
    "rejection": Method(reference=True, forwards=1, scored=True),
    "archer": Method(reference=True, scalars=3, scalar_targets=3, critic=True, forwards=1, scored=True),
}
"""By the algorithm's name; of two Q heads the scalars of utterances are two."""


@dataclass(frozen=True, kw_only=True)
class Plan(Options, group="model"):
    """Memory and time of training and acting, computed by formulas, and what to choose at a size.

    All figures are estimates: docs/guides/planning.md has them beside measurements.

    Options of the same name mean what they mean in `train`, but --batch-size and --games are those of all GPUs.
    """

    model: str | None = option(None, "name of an architecture, such as Qwen2.5-7B, or folder of a Hugging Face model")
    params: float | None = option(None, "billions of parameters, instead of a model", gt=0, le=1000)
    layers: int | None = option(None, "transformer blocks; like the others below: instead of the model's", ge=1)
    width: int | None = option(None, "hidden size", ge=1)
    heads: int | None = option(None, "attention heads", ge=1)
    kv_heads: int | None = option(None, "heads of keys and values", ge=1)
    ffn: int | None = option(None, "inner width of the MLP", ge=1)
    vocab: int | None = option(None, "vocabulary", ge=2)
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "of the language model's weights")
    quantize: Literal["int8", "int4"] | None = option(None, "frozen weights in 8 or 4 bits, below adapters")
    bf16: bool = option(False, "compute in bfloat16", group="optimisation")
    lora_rank: int | None = option(None, "train LoRA adapters of this rank, not the weights", ge=1)
    top_layers: int | None = option(None, "transformer blocks to train, counted from the last; none: all", ge=1)
    q_head: Literal["auto", "own", "tied"] = option(
        "auto", "own: QValueHead; tied: TiedQValueHead; auto: tied above 16384 tokens"
    )
    checkpointing: bool = option(False, "recompute activations in the backward pass")
    train: str = option("bc", "algorithm, as after `train`: bc, ilql, ppo, grpo, dpo, ...", group="loss")
    reference_dtype: Literal["same", "bfloat16", "int8", "int4"] = option(
        "same", "of a reference; same: that of the weights, of which it shares those that do not train", group="loss"
    )
    optimizer: Literal["adamw", "muon"] = option("adamw", "muon: one moment of matrices, not two", group="optimisation")
    optimizer_dtype: Literal["same", "float32", "bfloat16", "int8"] = option(
        "same", "of the moments; same: that of the weights", group="optimisation"
    )
    batch_size: int = option(16, "games in a step, on all GPUs together", group="optimisation", ge=1)
    accumulate: int = option(1, "batches that these are split into", group="optimisation", ge=1)
    epochs: int = option(2, "online: epochs over the games of an iteration", group="optimisation", ge=1)
    row_length: int = option(1024, "tokens of a row", group="data", ge=2)
    agent_share: float = option(0.5, "share of them that the agent wrote", group="data", gt=0, le=1)
    games: int = option(64, "games played in parallel, on all GPUs together", group="data", ge=1)
    turns: int = option(6, "turns of each", group="data", ge=1)
    gpus: int = option(1, "GPUs, or processes", group="run", ge=1)
    shard: Literal["no", "model", "all"] = option(
        "no",
        "no: each GPU has all weights (data parallel); model: FSDP2, with a whole reference on each GPU; all: the "
        "reference, a second model, as well",
        group="run",
    )
    card: str = option("H100", f"what it computes on: {', '.join(CARDS)}", group="run")
    gpu_memory: float | None = option(None, "GB of memory of each; none: the card's", group="run", gt=0)
    flops: float | None = option(None, "TFLOP/s at best; none: the card's", group="run", gt=0)
    bandwidth: float | None = option(None, "GB/s from memory at best; none: the card's", group="run", gt=0)
    link_bandwidth: float | None = option(
        None, "GB/s between GPUs, one way; none: the card's, and 50 with more than 8 GPUs", group="run", gt=0
    )
    mfu: float = option(0.5, "share of --flops that products reach (0.3 to 0.6 is usual)", group="run", gt=0, le=1)
    mbu: float = option(0.7, "share of --bandwidth that reading and writing reach", group="run", gt=0, le=1)
    sizes: bool = option(False, "a line for each typical size and number of GPUs instead", group="run")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("train", self.train, METHODS), ("card", self.card, CARDS)):
            if value not in known:
                raise ValueError(
                    f"There is no --{name} {value}{near(value, known)} The choices are {', '.join(known)}."
                )
        if self.quantize is not None and self.lora_rank is None:
            raise ValueError(f"Weights in --quantize {self.quantize} do not train: give --lora-rank.")
        if self.quantize is not None and self.shard != "no":
            raise ValueError(f"Weights in --quantize {self.quantize} are not sharded: leave out --shard {self.shard}.")

    @cached_property
    def shape(self) -> Architecture:
        """The model's architecture.

        Raises:
            ValueError: it is unknown, or numbers are missing.
        """
        names = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.model is not None:
            known = find_architecture(self.model)
        elif self.params is not None:
            known = of_size(self.params * 1e9, self.vocab or 128_256)
        elif {"layers", "width", "heads", "vocab"} <= given.keys():
            sizes = {"kv_heads": given["heads"], "ffn": 4 * given["width"], "head_width": 0, **given}
            known = Architecture(**sizes, tied=False)
        else:
            raise ValueError("Name the model: --model, --params, or --layers, --width, --heads and --vocab.")
        if {"width", "heads"} & given.keys():
            given["head_width"] = (self.width or known.width) // (self.heads or known.heads)
        return replace(known, **given)

    @property
    def method(self) -> Method:
        """That of the algorithm."""
        return METHODS[self.train]

    @property
    def online(self) -> bool:
        """Whether the algorithm plays games."""
        return hasattr(ALGORITHMS[self.train], "games")

    @cached_property
    def hardware(self) -> Card:
        """The card with what was given in its place."""
        card = CARDS[self.card]
        card = card._replace(
            flops=card.flops if self.compute_bytes == 2 else card.float32,
            link=card.link if self.gpus <= 8 else min(card.link, _OTHER_MACHINES),
        )
        given = {
            "memory": (self.gpu_memory, GB),
            "flops": (self.flops, 1e12),
            "bandwidth": (self.bandwidth, GB),
            "link": (self.link_bandwidth, GB),
        }
        return card._replace(**{name: value * unit for name, (value, unit) in given.items() if value is not None})

    @property
    def weight_bytes(self) -> float:
        """``b`` of the weights that train, and of others that are not quantized, nor blocks below top layers."""
        return BYTES["float32" if self.top_layers is not None else self.dtype]

    @property
    def compute_bytes(self) -> float:
        """``b`` of activations."""
        return 2.0 if self.bf16 else self.weight_bytes

    @property
    def converts(self) -> bool:
        """Whether autocast converts the weights; sharded ones are gathered in bfloat16 (``MixedPrecisionPolicy``)."""
        return self.bf16 and self.dtype == "float32" and self.shard == "no"

    @property
    def played(self) -> int:
        """Games played on one GPU."""
        return -(-self.games // self.gpus)

    @property
    def rows(self) -> int:
        """Rows of a batch on one GPU, ``batch_size / (G accumulate)``."""
        return -(-self.batch_size // (self.gpus * self.accumulate))

    @property
    def tokens(self) -> int:
        """Tokens of a batch on one GPU."""
        return self.rows * self.row_length

    @property
    def positions(self) -> int:
        """Positions of a batch on one GPU at which the agent decides."""
        return max(round(self.tokens * self.agent_share), 1)

    @property
    def trained_layers(self) -> int:
        """Blocks that keep activations."""
        if not self.method.trains:
            return 0
        return min(self.top_layers or self.shape.layers, self.shape.layers)

    @property
    def head_trains(self) -> bool:
        """Whether the output layer gets a gradient."""
        whole = self.lora_rank is None and self.method.trains
        return whole and (self.top_layers is None or not self.shape.tied)

    @property
    def tied_q(self) -> bool:
        """Whether the Q heads use the embedding."""
        return self.shape.vocab > _LARGE_VOCABULARY if self.q_head == "auto" else self.q_head == "tied"

    @property
    def sharded(self) -> int:
        """Number of GPUs that share the weights."""
        return 1 if self.shard == "no" else self.gpus
