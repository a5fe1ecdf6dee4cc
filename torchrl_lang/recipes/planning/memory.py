"""Memory of training and acting by formulas. Nothing here imports torch.

Letters are those of :class:`~torchrl_lang.recipes.planning.architectures.Architecture`; besides, ``N`` is the number of
weights, ``b`` the bytes of a number, ``G`` the number of GPUs. ``benchmarks/plan_check.py`` measures beside them.
"""

from __future__ import annotations

from typing import NamedTuple

from torchrl_lang.recipes.planning.options import BYTES, Plan

# As in the losses: bytes of a chunk of logits, its least positions, and numbers of one that is computed again.
_CHUNK_BYTES, _LEAST_POSITIONS, _PIECE = 48 * 2**20, 128, 2**24


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


def model_bytes(plan: Plan) -> float:
    """``b N``; the blocks below top layers have a ``b`` of their own, so have matrices that are quantized.

    Adapters are in float32.
    """
    shape, b = plan.shape, plan.weight_bytes
    quantized = 0 if plan.quantize is None else shape.layers * shape.matrices
    below = 0 if plan.top_layers is None else (shape.layers - plan.trained_layers) * shape.block
    inside = quantized * BYTES[plan.quantize or "int8"] + below * BYTES[plan.dtype]
    return b * (shape.parameters - quantized - below) + inside + 4 * adapters(plan)


def trained_bytes(plan: Plan) -> float:
    """Bytes of the weights that train; adapters are in float32."""
    return trained_weights(plan) * (plan.weight_bytes if plan.lora_rank is None else 4.0)


def gradient_bytes(plan: Plan) -> float:
    """``b`` a trained weight, in its dtype; value heads in float32. FSDP shares them out."""
    return (trained_bytes(plan) * _copies(plan) + 4 * head_weights(plan)) / plan.sharded


def optimizer_bytes(plan: Plan) -> float:
    """Two moments a trained weight; Muon has one of the blocks' matrices."""
    numbers = 2 * trained_weights(plan) * _copies(plan)
    if plan.optimizer == "muon" and plan.lora_rank is None:
        numbers -= plan.trained_layers * plan.shape.matrices
    b = BYTES.get(plan.optimizer_dtype, plan.weight_bytes if plan.lora_rank is None else 4.0)
    return (b * numbers + BYTES.get(plan.optimizer_dtype, 4.0) * 2 * head_weights(plan)) / plan.sharded


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
        return (trained_bytes(plan) + trunk + heads) / plan.sharded
    model = model_bytes(plan) + (b * shape.table if shape.tied else 0)
    return (heads + plan.method.target_model * model) / plan.sharded


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
    """FSDP gathers the tables, which stay for the heads, two blocks, and all value heads; with their gradients."""
    if plan.sharded == 1:
        return 0.0
    values = 4.0 * (2 * head_weights(plan) + target_head_weights(plan))
    shape, tables = plan.shape, plan.shape.table * (1 if plan.shape.tied else 2)
    gradients = (tables + shape.block) * plan.compute_bytes if plan.lora_rank is None else 0
    return (tables + 2 * shape.block) * plan.compute_bytes + gradients + values


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


def by_part(plan: Plan) -> Memory:
    """All parts of the memory."""
    return Memory(
        weights=model_bytes(plan) / plan.sharded,
        value_heads=4.0 * head_weights(plan) / plan.sharded,
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
    parts, early, block = by_part(plan), early_gradient_bytes(plan), recomputed_bytes(plan)
    waiting = parts.gradients if plan.accumulate > 1 else 0.0
    if plan.method.scored:  # the pieces' gradients come after all of them
        beside = max(parts.head_outputs, early, early / 3 + block)
    else:
        beside = early + max(parts.head_outputs, block)
    first = parts.activations + waiting + beside
    return parts.resident + parts.gathered + max(first, parts.gradients + late_bytes(plan))


def acting_peak(plan: Plan) -> float:
    """The most bytes while games are played: all weights, which FSDP gathers, and logits of a token, ``12 V``.

    Under autocast also half-precision copies of the weights.
    """
    if not plan.online:
        return 0.0
    parts = by_part(plan)
    whole = plan.shape.parameters * plan.compute_bytes + 4.0 * (head_weights(plan) + target_head_weights(plan))
    whole *= plan.shard != "no"
    return parts.resident + whole + _copied_bytes(plan) + 12.0 * plan.shape.vocab * plan.played


def peak(plan: Plan) -> float:
    """The most bytes on each GPU."""
    return max(learning_peak(plan), acting_peak(plan))


def fits(plan: Plan) -> bool:
    """Whether the peak leaves a tenth of the memory, for the allocator and the processor's own libraries."""
    return peak(plan) <= 0.9 * plan.hardware.memory
