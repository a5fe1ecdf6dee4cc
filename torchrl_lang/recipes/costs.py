"""Compute memory and time of training and acting by formulas. Nothing here imports torch.

Letters are those of :class:`~torchrl_lang.recipes.architectures.Architecture`; besides, ``N`` is the number of weights,
``b`` the bytes of a number, ``G`` the number of GPUs. ``benchmarks/plan_check.py`` measures beside the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from torchrl_lang.recipes.algorithms import ALGORITHMS, ArCHer
from torchrl_lang.recipes.architectures import CARDS, Architecture, Card, find_architecture, of_size
from torchrl_lang.recipes.options import Options, near, option

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "int4": 0.52}
"""Of a number; 4-bit weights (NF4) have scales, too."""
GB = 1e9

# As in the losses: bytes of a chunk of logits, its least positions, and numbers of one that is computed again.
_CHUNK_BYTES, _LEAST_POSITIONS, _PIECE = 48 * 2**20, 128, 2**22
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
        link = card.link if self.gpus <= 8 else min(card.link, _OTHER_MACHINES)
        half = self.compute_bytes == 2
        return Card(
            memory=self.gpu_memory * GB if self.gpu_memory else card.memory,
            flops=self.flops * 1e12 if self.flops else card.flops if half else card.float32,
            float32=card.float32,
            bandwidth=self.bandwidth * GB if self.bandwidth else card.bandwidth,
            link=self.link_bandwidth * GB if self.link_bandwidth else link,
            latency=card.latency,
        )

    @property
    def weight_bytes(self) -> float:
        """``b`` of the weights that train, and of others that are not quantized."""
        return BYTES[self.dtype]

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


# -- numbers of weights ------------------------------------------------------------------------------------------------


def adapters(plan: Plan) -> int:
    """``r (inputs + outputs)`` of each linear layer."""
    each = sum(rows + columns for rows, columns in plan.shape.linears)
    return (plan.lora_rank or 0) * each * plan.trained_layers


def trained_weights(plan: Plan) -> int:
    """Weights of the language model that train: ``N``; of top layers their blocks, the last norm, an untied head."""
    shape = plan.shape
    if plan.lora_rank is not None:
        return adapters(plan)
    if not plan.method.trains:
        return 0
    if plan.top_layers is None:
        return shape.parameters
    return plan.trained_layers * shape.block + shape.final_norm + (0 if shape.tied else shape.table)


def q_weights(plan: Plan, tied: bool | None = None) -> int:
    """Weights of two Q heads: ``2 (2H^2 + 2H + (2H + 1) out)``, ``out`` is ``V``, of tied heads ``H + 1``."""
    h, tied = plan.shape.width, plan.tied_q if tied is None else tied
    return 2 * (2 * h * h + 2 * h + (2 * h + 1) * (h + 1 if tied else plan.shape.vocab))


def head_weights(plan: Plan) -> int:
    """Weights of all value heads; one with a single output has ``2H^2 + 4H + 1``."""
    h = plan.shape.width
    return plan.method.qvalue * q_weights(plan) + plan.method.scalars * (2 * h * h + 4 * h + 1)


def target_head_weights(plan: Plan) -> int:
    """Weights of the target heads."""
    h = plan.shape.width
    return plan.method.qvalue * q_weights(plan) + plan.method.scalar_targets * (2 * h * h + 4 * h + 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def model_bytes(plan: Plan) -> float:
    """``b N``, of quantized models ``b`` of the blocks' matrices is that of the quantization; adapters in float32."""
    shape, b = plan.shape, plan.weight_bytes
    quantized = 0 if plan.quantize is None else shape.layers * shape.matrices
    inside = quantized * BYTES[plan.quantize or "int8"]
    return b * (shape.parameters - quantized) + inside + 4 * adapters(plan)


def trained_bytes(plan: Plan) -> float:
    """Bytes of the weights that train; adapters are in float32."""
    return trained_weights(plan) * (plan.weight_bytes if plan.lora_rank is None else 4.0)


def gradient_bytes(plan: Plan) -> float:
    """``b`` a trained weight, in its dtype; value heads in float32. FSDP shares out those of the model."""
    return trained_bytes(plan) * _copies(plan) / plan.sharded + 4 * head_weights(plan)


def optimizer_bytes(plan: Plan) -> float:
    """Two moments a trained weight; Muon has one of the blocks' matrices."""
    numbers = 2 * trained_weights(plan) * _copies(plan)
    if plan.optimizer == "muon" and plan.lora_rank is None:
        numbers -= plan.trained_layers * plan.shape.matrices
    b = BYTES.get(plan.optimizer_dtype, plan.weight_bytes if plan.lora_rank is None else 4.0)
    return b * numbers / plan.sharded + BYTES.get(plan.optimizer_dtype, 4.0) * 2 * head_weights(plan)


def _copies(plan: Plan) -> int:
    """Models that train: the policy and, of ArCHer, the critic's trunk."""
    return 2 if plan.method.critic else 1


def target_bytes(plan: Plan) -> float:
    """Target heads in float32; of Q-SFT the model once more, of ArCHer a critic's trunk and its target copy.

    The critic shares the weights that do not train; a target copies all, that of Q-SFT a tied embedding twice.
    """
    shape, b, heads = plan.shape, plan.weight_bytes, 4 * target_head_weights(plan)
    trunk = model_bytes(plan) - (0 if shape.tied else b * shape.table)
    if plan.method.critic:
        return (trained_bytes(plan) + trunk) / plan.sharded + heads
    model = model_bytes(plan) + (b * shape.table if shape.tied else 0)
    return heads + (model / plan.sharded if plan.method.target_model else 0)


def reference_bytes(plan: Plan) -> float:
    """The weights that train, once more, as a reference shares the rest; none beside adapters, as they can be off.

    That of Q-SFT is a copy in any case, of its adapters too. In another dtype than the model's it shares nothing.
    """
    if not plan.method.reference or (plan.lora_rank is not None and not plan.method.target_model):
        return 0.0
    among = plan.gpus if plan.shard == "all" else 1
    if plan.reference_dtype == "same":
        return trained_bytes(plan) / among
    shape, quantized = plan.shape, plan.shape.layers * plan.shape.matrices
    rest = (shape.parameters - quantized) * min(plan.weight_bytes, 2.0)
    return (quantized * BYTES[plan.reference_dtype] + rest) / among


def gathered_bytes(plan: Plan) -> float:
    """FSDP gathers the tables, which stay for the heads, and two blocks; with their gradients."""
    if plan.sharded == 1:
        return 0.0
    shape, tables = plan.shape, plan.shape.table * (1 if plan.shape.tied else 2)
    gradients = (tables + shape.block) * plan.compute_bytes if plan.lora_rank is None else 0
    return (tables + 2 * shape.block) * plan.compute_bytes + gradients


def kept_bytes(plan: Plan) -> float:
    """Bytes that a token leaves in a block for the backward pass.

    Queries, keys, values, what attention gives, and the MLP's inner states, ``b (2A + 2K + 4F)`` (of gpt2 ``2F``); of
    each norm its input and its output, and where RMS norms train their input before its scale is applied, mostly in
    float32; of linear layers that are adapted, in half precision, a float32 copy of their inputs.
    """
    shape, b = plan.shape, plan.compute_bytes
    stream = 4.0 if plan.converts else b  # of the sum of the blocks' outputs, which autocast leaves as it is
    gated, adapted = shape.kind != "gpt2", plan.lora_rank is not None
    h, a, k, f = shape.width, shape.queries, shape.keys, shape.ffn
    inner = b * (2 * a + 2 * k + ((4 if gated else 2) - (adapted and b < 4)) * f)
    norms = shape.norms * h * (4.0 if gated else stream)
    if gated and not adapted:
        norms += shape.norms * h * (4.0 if shape.kind == "gemma" else stream)
    if shape.qk_norm:
        norms += (a + k) * (4.0 if adapted else 4.0 + stream)
    copies = 5 if gated and plan.converts else 2  # autocast converts for each layer
    inputs = b * copies * h
    if adapted:
        ranks = 4.0 * (plan.lora_rank or 0) * len(shape.linears)
        inputs = ranks + (4.0 * sum(rows for rows, _ in shape.linears) if b < 4 else inputs)
    scales = shape.norms * (1 if gated else 2) + shape.qk_norm * (shape.heads + shape.kv_heads)
    return inner + norms + inputs + 4.0 * (shape.heads + scales)


def activation_bytes(plan: Plan) -> float:
    """:func:`kept_bytes` of all trained blocks; with checkpointing their inputs, ``b H``.

    Under autocast also half-precision copies of the weights.
    """
    inputs = plan.shape.width * (4.0 if plan.converts else plan.compute_bytes)
    each = inputs if plan.checkpointing else kept_bytes(plan)
    return plan.trained_layers * each * plan.tokens + _copied_bytes(plan)


def recomputed_bytes(plan: Plan) -> float:
    """Checkpointing computes one block again at a time; with gradients of its MLP, ``2 b F`` a token."""
    each = kept_bytes(plan) + 2 * plan.compute_bytes * plan.shape.ffn
    return each * plan.tokens if plan.checkpointing and plan.trained_layers else 0.0


def _copied_bytes(plan: Plan) -> float:
    """The half-precision copies of the blocks' matrices that autocast keeps."""
    return 2.0 * plan.shape.layers * plan.shape.matrices if plan.converts else 0.0


def chunk(plan: Plan) -> int:
    """Positions whose logits exist at a time."""
    if plan.method.scored:
        return min(max(_PIECE // plan.shape.vocab, 1), plan.positions)
    most = int(_CHUNK_BYTES // (plan.shape.vocab * plan.compute_bytes))
    return min(max(_LEAST_POSITIONS, most), plan.positions)


def output_bytes(plan: Plan) -> float:
    """Terms over the vocabulary hold logits of a chunk, the states that they read, and the features of heads.

    The chunked cross-entropy has one buffer (beside it on a GPU log-probabilities in float32), pieces that are computed
    again have four at a time.
    """
    shape, c, b = plan.shape, chunk(plan), plan.compute_bytes
    if plan.method.scored or plan.method.tables:
        buffers = 4 * 4.0 * c * shape.vocab
    else:
        buffers = c * shape.vocab * (b + (0 if plan.card == "CPU-core" else 4.0 if b == 4 else 8.0))
    heads = 2 * plan.method.qvalue + plan.method.scalars
    return buffers + plan.positions * shape.width * (b + 4.0 + heads * 2 * 2 * 4.0)


def early_gradient_bytes(plan: Plan) -> float:
    """Gradients that exist while all activations do: those of the output layer, ``4 V H``, and of the Q heads.

    The chunked cross-entropy computes them in the forward pass; the gradients of pieces are summed, three at a time.
    """
    of_q = 0.0 if plan.tied_q else 4.0 * plan.method.qvalue * q_weights(plan)
    if not plan.head_trains:
        return of_q
    return of_q + plan.shape.table * (3 * plan.weight_bytes if plan.method.scored else 4.0)


def late_bytes(plan: Plan) -> float:
    """Beside all gradients, at the end of the backward pass: the two parts of a tied embedding's, ``2 b V H``."""
    whole = plan.head_trains and plan.shape.tied
    return whole * 2 * plan.shape.table * plan.weight_bytes


def cache_bytes(plan: Plan) -> float:
    """Keys and values of the games on one GPU: ``2 b L K T`` for each."""
    return 2 * plan.compute_bytes * plan.shape.layers * plan.shape.keys * plan.row_length * plan.played


def row_bytes(plan: Plan) -> float:
    """A token of a row: its id (8), masks (2) and reward (4); online also log-probabilities, values and advantages."""
    return plan.row_length * (34.0 * plan.played if plan.online else 14.0 * plan.rows)


class Memory(NamedTuple):
    """Bytes on each GPU, by part."""

    weights: float
    value_heads: float
    targets: float
    reference: float
    optimizer: float
    rows: float
    keys_and_values: float
    """Of games; they stay until the iteration has ended."""
    gathered: float
    gradients: float
    activations: float
    head_outputs: float

    @property
    def resident(self) -> float:
        """All that stays from step to step."""
        return sum(self[:7])


def memory(plan: Plan) -> Memory:
    """All parts."""
    return Memory(
        weights=model_bytes(plan) / plan.sharded,
        value_heads=4.0 * head_weights(plan),
        targets=target_bytes(plan),
        reference=reference_bytes(plan),
        optimizer=optimizer_bytes(plan),
        rows=row_bytes(plan),
        keys_and_values=cache_bytes(plan) if plan.online else 0.0,
        gathered=gathered_bytes(plan),
        gradients=gradient_bytes(plan),
        activations=activation_bytes(plan),
        head_outputs=output_bytes(plan),
    )


def learning_peak(plan: Plan) -> float:
    """The most bytes of a step: at the end of its forward pass, or of its backward pass.

    Gradients of the batches before wait beside the activations where there are several.
    """
    parts, early, block = memory(plan), early_gradient_bytes(plan), recomputed_bytes(plan)
    waiting = parts.gradients if plan.accumulate > 1 else 0.0
    if plan.method.scored:  # the pieces' gradients come after all of them
        beside = max(parts.head_outputs, early, early / 3 + block)
    else:
        beside = early + max(parts.head_outputs, block)
    first = parts.activations + waiting + beside
    return parts.resident + parts.gathered + max(first, parts.gradients + late_bytes(plan))


def acting_peak(plan: Plan) -> float:
    """The most bytes while games are played: the whole model, which FSDP gathers, and logits of a token, ``12 V``.

    Under autocast also half-precision copies of the weights.
    """
    if not plan.online:
        return 0.0
    parts = memory(plan)
    whole = 0.0 if plan.shard == "no" else plan.shape.parameters * plan.compute_bytes
    return parts.resident + whole + _copied_bytes(plan) + 12.0 * plan.shape.vocab * plan.played


def peak(plan: Plan) -> float:
    """The most bytes on each GPU."""
    return max(learning_peak(plan), acting_peak(plan))


def fits(plan: Plan) -> bool:
    """Whether the peak leaves a tenth of the memory, for the allocator and the processor's own libraries."""
    return peak(plan) <= 0.9 * plan.hardware.memory


# -- time --------------------------------------------------------------------------------------------------------------


def forward_flops(plan: Plan, tokens: float) -> float:
    """``2 L M`` a token of the blocks' matrices ``M``, and ``2 L A T`` for attention to half a row on average."""
    shape = plan.shape
    return tokens * shape.layers * (2 * shape.matrices + 2 * shape.queries * plan.row_length)


def trunk_flops(plan: Plan) -> float:
    """Of a batch on one GPU: forward once; backward twice the trained blocks', or once where their weights are frozen.

    Checkpointing computes the trained blocks once more. Further passes are those of references and targets.
    """
    once, share = forward_flops(plan, plan.tokens), plan.trained_layers / plan.shape.layers
    backward = 1.0 if plan.lora_rank is not None else 2.0
    passes = 1 + share * (backward + plan.checkpointing) + plan.method.forwards
    return once * passes + 6.0 * adapters(plan) * plan.tokens


def head_flops(plan: Plan) -> float:
    """Of a batch on one GPU: ``2 V H`` a position for each product over the vocabulary.

    Three where the output layer trains (logits, states' gradients, weights' gradients), else two; one more for pieces
    that are computed again, for each reference and for a target. Each Q head has products with twice the width, or with
    the embedding two; one more in backups.
    """
    shape, method = plan.shape, plan.method
    products: float = (3 if plan.head_trains else 2) + method.scored + min(method.forwards, 2)
    if method.qvalue:
        products += 2 * ((2 if plan.tied_q else 3 * 2) + method.tables * (1 if plan.tied_q else 2))
    if not method.trains:
        products = 0.0
    return plan.positions * (2.0 * shape.table * products + 6.0 * head_weights(plan) * (not method.qvalue))


def moved_bytes(plan: Plan) -> float:
    """A batch moves through memory, beside products, each number that is kept four times.

    It is written and read, and so is its gradient. Over the vocabulary a logit moves eight times.
    """
    kept = plan.trained_layers * kept_bytes(plan) * plan.tokens
    frozen = (plan.shape.layers - plan.trained_layers + plan.method.forwards * plan.shape.layers) * kept_bytes(plan)
    logits = plan.positions * plan.shape.vocab * plan.compute_bytes * 8.0 * (1 + 2 * plan.method.qvalue)
    return (4.0 + 2.0 * plan.checkpointing) * kept + 2.0 * frozen * plan.tokens + logits * plan.method.trains


def update_bytes(plan: Plan) -> float:
    """The optimizer moves ten numbers a trained weight.

    AdamW reads the weight, its gradient and two moments and writes three; clipping reads the gradient twice and writes
    it. Target copies read two and write one.
    """
    trained = trained_bytes(plan) * _copies(plan) / plan.sharded + 4.0 * head_weights(plan)
    return 10.0 * trained + 3.0 * target_bytes(plan)


def communication_bytes(plan: Plan) -> float:
    """A GPU sends ``2 (G - 1) / G`` of the gradients in a step.

    With FSDP for each batch the weights twice, forward and backward, and the gradients once.
    """
    share = (plan.gpus - 1) / plan.gpus
    heads = 2 * share * 4.0 * head_weights(plan)
    if plan.shard == "no":
        return 2 * share * trained_bytes(plan) + heads
    weights = plan.shape.parameters * plan.compute_bytes
    return share * plan.accumulate * (2 * weights + trained_bytes(plan)) + heads


class Step(NamedTuple):
    """Seconds of a training step, by part."""

    products: float
    memory: float
    optimizer: float
    communication: float

    @property
    def total(self) -> float:
        """All of it, as nothing is assumed to overlap."""
        return sum(self)


def step_seconds(plan: Plan) -> Step:
    """Products over ``flops mfu``, moved bytes over ``bandwidth mbu``; no block takes less than its latency."""
    card, n = plan.hardware, plan.accumulate
    products = n * (trunk_flops(plan) + head_flops(plan)) / (card.flops * plan.mfu)
    moved = n * moved_bytes(plan) / (card.bandwidth * plan.mbu)
    least = n * card.latency * plan.shape.layers * (3 + plan.checkpointing + plan.method.forwards)
    update = update_bytes(plan) / (card.bandwidth * plan.mbu)
    return Step(max(products, least - moved), moved, update, communication_bytes(plan) / card.link)


class Acting(NamedTuple):
    """Seconds of the games of an iteration, by part."""

    reading: float
    """The tokens that the environment writes, many at a time."""
    writing: float
    """The tokens that the agent writes, one after another."""
    gathering: float
    """Of the weights that FSDP shards, once a turn."""
    reference: float
    """Their log-probabilities under the reference."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def token_seconds(plan: Plan) -> float:
    """Seconds in which each game of a GPU gets one token: reading the weights, or computing, whichever takes longer.

    The keys and values of half a row are read as well, and no block takes less than its latency.
    """
    shape, card = plan.shape, plan.hardware
    half = plan.bf16 and plan.dtype == "float32"
    read = model_bytes(plan) * (0.5 if half else 1.0) + cache_bytes(plan) / 2
    computed = plan.played * (forward_flops(plan, 1) + 2.0 * shape.table)
    return max(read / (card.bandwidth * plan.mbu), computed / (card.flops * plan.mfu), card.latency * shape.layers)


def acting_seconds(plan: Plan) -> Acting:
    """Seconds of the games of an iteration."""
    if not plan.online:
        return Acting(0.0, 0.0, 0.0, 0.0)
    card, tokens = plan.hardware, plan.played * plan.row_length
    written, rate = plan.row_length * plan.agent_share, card.flops * plan.mfu
    logits = 2.0 * plan.shape.table * plan.played * written
    scores = (forward_flops(plan, tokens) + logits) / rate
    return Acting(
        reading=forward_flops(plan, tokens - plan.played * written) / rate,
        writing=written * token_seconds(plan),
        gathering=0.0 if plan.shard == "no" else plan.turns * plan.shape.parameters * plan.compute_bytes / card.link,
        reference=scores * plan.method.reference,
    )


def iteration_seconds(plan: Plan) -> float:
    """Seconds of the games, and of the steps of all epochs over them; offline those of a step."""
    steps = plan.epochs * max(plan.games // plan.batch_size, 1) if plan.online else 1
    steps += ArCHer.value_steps if plan.method.critic else 0  # of its critic, each about as long
    return acting_seconds(plan).total + steps * step_seconds(plan).total


def enough_games(plan: Plan) -> int:
    """Games on a GPU from which on computing takes as long as reading the weights."""
    card, each = plan.hardware, forward_flops(plan, 1) + 2.0 * plan.shape.table
    return round(model_bytes(plan) / (card.bandwidth * plan.mbu) * card.flops * plan.mfu / each)
