"""Time of training and acting by formulas. Nothing here imports torch.

Letters are those of :class:`~torchrl_lang.recipes.planning.architectures.Architecture`; besides, ``N`` is the number of
weights, ``b`` the bytes of a number, ``G`` the number of GPUs. ``benchmarks/plan_check.py`` measures beside them.
"""

from __future__ import annotations

from typing import NamedTuple

from torchrl_lang.recipes.algorithms import ArCHer
from torchrl_lang.recipes.planning.memory import (
    _copies,
    adapters,
    cache_bytes,
    head_weights,
    kept_bytes,
    model_bytes,
    target_bytes,
    trained_bytes,
)
from torchrl_lang.recipes.planning.options import Plan


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
