"""``plan``: memory and time of training and acting in a table, and what to choose. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from torchrl_lang.recipes.algorithms import ArCHer
from torchrl_lang.recipes.options import dashed
from torchrl_lang.recipes.planning import memory
from torchrl_lang.recipes.planning.architectures import TYPICAL
from torchrl_lang.recipes.planning.options import BYTES, GB, Plan

NUMBERS = (1, 8, 64)
"""Numbers of GPUs of ``--sizes``."""


def main(options: Plan) -> None:
    """Print a plan, or with ``--sizes`` what to choose for typical models and numbers of GPUs."""
    if options.sizes:
        print(sizes(options))
    else:
        print(page(options))


def page(plan: Plan) -> str:
    """The plan as text: memory by part, time by part, advice."""
    shape, card = plan.shape, plan.hardware
    name = plan.model or "a model"
    width = f"{shape.layers} layers of width {shape.width:,}, {shape.vocab:,} tokens"
    head = f"{name}: {shape.parameters / 1e9:.3g} B parameters, {width}; {plan.train} on {plan.gpus} x {plan.card}"
    found = "fits" if memory.fits(plan) else "does NOT fit"
    lines = [head, "", *_table("memory of each, GB", _memory_rows(plan))]
    lines += [f"{found} in {card.memory / GB:.3g} GB, of which a tenth is left free", ""]
    lines += [*_table(f"a step of {plan.batch_size} rows, s", _step_rows(plan)), ""]
    if plan.online:
        lines += [*_table(f"an iteration of {plan.games} games, s", _iteration_rows(plan)), ""]
    return "\n".join([*lines, "What to choose", *(f"- {line}" for line in advice(plan)), "", _ASSUMED])


_ASSUMED = (
    "Estimates. They assume the shares of the peak rates that --mfu and --mbu give, rows of --row-length tokens, and\n"
    "that nothing overlaps. The guide `planning` has them beside measurements."
)


def _table(title: str, rows: list[tuple[str, float]]) -> list[str]:
    return [title, *(f"  {name:<42}{_short(value):>10}" for name, value in rows)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _memory_rows(plan: Plan) -> list[tuple[str, float]]:
    parts = {name.replace("_", " "): value for name, value in memory.by_part(plan)._asdict().items() if value}
    peaks = {"at most, learning": memory.learning_peak(plan), "at most, acting": memory.acting_peak(plan)}
    return [(name, value / GB) for name, value in (parts | peaks).items() if value]


def _step_rows(plan: Plan) -> list[tuple[str, float]]:
    step = step_seconds(plan)
    names = {"products": "matrix products", "memory": "moving activations", "optimizer": "optimizer and targets"}
    rows = [(names.get(name, name), value) for name, value in step._asdict().items() if value]
    return [*rows, ("all", sum(step)), ("tokens a second, all GPUs", plan.batch_size * plan.row_length / sum(step))]


def _iteration_rows(plan: Plan) -> list[tuple[str, float]]:
    games = acting_seconds(plan)
    names = {"reading": "reading the environment's tokens", "writing": "writing the agent's tokens"}
    rows = [(names.get(name, name), value) for name, value in games._asdict().items() if value]
    total = iteration_seconds(plan)
    return [*rows, (f"steps of {plan.epochs} epochs", total - sum(games)), ("all", total)]


# -- what to choose ----------------------------------------------------------------------------------------------------


def choose(plan: Plan) -> Plan:
    """The plan if it fits; else the fastest that does among :func:`_candidates`, or the smallest where none does.

    All weights come before adapters, a reference as it is before one in fewer bits, weights in 16 bits before others.

    Examples:
        >>> from torchrl_lang.recipes.planning.options import Plan
        >>> from torchrl_lang.recipes.planning.report import changes, choose
        >>> plan = Plan(model="Qwen2.5-7B", train="grpo", gpus=8)
        >>> changes(plan, choose(plan))
        '--shard all'
    """
    if memory.fits(plan):
        return plan
    found = [*_candidates(plan)]

    def order(each: Plan) -> tuple[bool, float, float, float]:
        """Options count a hundredth of the time, so that none is there without need."""
        slower = 1 + 0.01 * len(changes(plan, each).split())
        bits = BYTES.get(each.quantize or "", 2.0), BYTES.get(each.reference_dtype, 5.0)
        return each.lora_rank is not None, -bits[0], -bits[1], iteration_seconds(each) * slower

    fitting = [each for each in found if memory.fits(each)]
    return min(fitting, key=order) if fitting else min(found, key=memory.peak)


def _candidates(plan: Plan) -> Iterator[Plan]:
    """Plans with any of the options that save memory, in all combinations."""
    accumulate = [2**n for n in range(12) if plan.accumulate < 2**n <= max(plan.batch_size // plan.gpus, 1)]
    sharded = ["model", *(["all"] if plan.method.reference else [])] if plan.gpus > 1 else []
    recompute = [True] if plan.checkpointing else [False, True]
    for number, recomputed, shard, trained in product(
        [plan.accumulate, *accumulate], recompute, dict.fromkeys([plan.shard, *sharded]), _trained(plan)
    ):
        change: dict[str, Any] = {"accumulate": number, "checkpointing": recomputed, "shard": shard, **trained}
        if change.get("quantize", plan.quantize) is None or change["shard"] == "no":
            yield replace(plan, **change)


def _trained(plan: Plan) -> list[dict[str, Any]]:
    """Options of what trains and of the reference."""
    adapted: dict[str, Any] = {"lora_rank": plan.lora_rank or 16, "top_layers": None}
    adapted |= {} if plan.dtype != "float32" or plan.card == "CPU-core" else {"dtype": "bfloat16"}
    found = [adapted, adapted | {"quantize": "int8"}, adapted | {"quantize": "int4"}]
    if plan.lora_rank is None:
        found.append({"q_head": "tied"} if plan.method.qvalue and not plan.tied_q else {})
        if plan.method.reference:
            found += [{"reference_dtype": dtype} for dtype in ("bfloat16", "int8", "int4")]
    return found


def changes(plan: Plan, other: Plan) -> str:
    """The options in which another plan differs, as the command line writes them."""
    found = []
    for field in fields(plan):
        value = getattr(other, field.name)
        if value != getattr(plan, field.name):
            words = "" if value is True else f" {value}".lower()
            found.append(f"--{dashed(field.name)}{words}")
    return " ".join(found)


def advice(plan: Plan) -> list[str]:
    """Advise on the options, in sentences with figures."""
    chosen = choose(plan)
    if not memory.fits(chosen):
        yet = f"it needs {memory.peak(chosen) / GB:.3g} GB"
        lines = [
            f"It does not fit, whatever is chosen: with {changes(plan, chosen)} {yet}. More GPUs, or shorter rows."
        ]
    elif chosen != plan:
        lines = [f"It fits with {changes(plan, chosen)}: {_figures(chosen)}."]
    else:
        lines = [f"It fits as it is: {_figures(plan)}."]
    return [*lines, *_of_precision(plan), *_of_parts(plan), *_of_acting(chosen)]


def _figures(plan: Plan) -> str:
    what = "an iteration" if plan.online else "a step"
    return f"{memory.peak(plan) / GB:.3g} GB, {_short(iteration_seconds(plan))} s {what}"


def _of_precision(plan: Plan) -> Iterator[str]:
    if plan.compute_bytes == 4 and plan.card != "CPU-core":
        faster = iteration_seconds(plan) / iteration_seconds(replace(plan, bf16=True, flops=None))
        yield f"--bf16, which computes in bfloat16 with weights in float32, is {faster:.2g} times as fast."
    if plan.weight_bytes == 2 and plan.lora_rank is None and plan.method.trains:
        yield "Weights that train in half precision lose small updates: --dtype float32 --bf16, or --lora-rank."


def _of_parts(plan: Plan) -> Iterator[str]:
    if plan.method.qvalue and not plan.tied_q:
        own, tied = (memory.q_weights(plan, tied) / 1e6 for tied in (False, True))
        if own > 2 * tied:
            yield f"A QValueHead has {own:,.0f} M weights, and as many in its target; a TiedQValueHead {tied:,.0f} M."
    parts = memory.by_part(plan)
    if plan.method.target_model:
        beside = (parts.targets + parts.reference) / GB
        yield f"{plan.train} keeps three models; targets and reference have {beside:.3g} GB."
    elif parts.reference > 0.1 * memory.peak(plan):
        less = replace(plan, reference_dtype="int8")
        yield (
            f"The reference has {parts.reference / GB:.3g} GB, in 8 bits {memory.reference_bytes(less) / GB:.3g}; "
            "beside adapters none, beside --top-layers only what trains."
        )


def _of_acting(plan: Plan) -> Iterator[str]:
    if not plan.online:
        return
    share = acting_seconds(plan).writing / iteration_seconds(plan)
    games, enough = plan.played, enough_games(plan)
    if share > 0.5:
        yield (
            f"Writing takes {share:.0%} of an iteration, {plan.agent_share * plan.row_length:,.0f} tokens one after "
            "another: an inference engine on GPUs of its own can write while this trains."
        )
    room = plan.hardware.memory * 0.9 - memory.acting_peak(plan)
    together = min(enough, games + int(room * games / memory.cache_bytes(plan)))
    if together > games:
        yield f"Up to {together:,} games on a GPU write in the time of these {games}: play more at a time."
    if plan.shard != "no":
        yield (
            f"Acting gathers the whole model on each GPU, {plan.shape.parameters * plan.compute_bytes / GB:.3g} GB: "
            "where that does not fit, play in an engine of its own."
        )


# -- typical sizes -----------------------------------------------------------------------------------------------------


def sizes(plan: Plan) -> str:
    """A line for each typical model and each of :data:`NUMBERS`: what makes it fit, with its memory and time.

    ``batch_size`` and ``games`` are those of each GPU here.
    """
    lines = [("model", "GPUs", "options", "GB", "s", "tokens/s")]
    for model in TYPICAL:
        for gpus in NUMBERS:
            sized = replace(plan, model=model, gpus=gpus, batch_size=plan.batch_size * gpus, games=plan.games * gpus)
            found = choose(sized)
            fits, seconds = memory.fits(found), iteration_seconds(found)
            speed = (found.games if found.online else found.batch_size) * found.row_length / seconds
            rest = (_short(seconds), _short(speed)) if fits else ("-", "-")
            options = changes(sized, found) or "-" if fits else "does not fit"
            lines.append((model, str(gpus), options, f"{memory.peak(found) / GB:.3g}", *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


# -- time, by formulas -------------------------------------------------------------------------------------------------

# Letters are those of memory.py; benchmarks/plan_check.py measures beside them.


def forward_flops(plan: Plan, tokens: float) -> float:
    """``2 L M`` a token of the blocks' matrices ``M``, and attention's ``2 L A T``."""
    return 2.0 * tokens * plan.shape.layers * plan.shape.matrices + attention_flops(plan, tokens)


def attention_flops(plan: Plan, tokens: float) -> float:
    """``2 L A T`` a token, for half a row on average, as many as matrices multiply in the same time."""
    shape = plan.shape
    return 2.0 * tokens * shape.layers * shape.queries * plan.row_length / plan.hardware.attention


def trunk_flops(plan: Plan) -> float:
    """Of a batch on one GPU: forward once; backward twice the trained blocks', or once where their weights are frozen.

    The backward pass of attention takes 2.5 times its forward pass in any case, as it computes the scores again.
    Checkpointing computes the trained blocks once more. Further passes are those of references and targets.
    """
    once, share = forward_flops(plan, plan.tokens), plan.trained_layers / plan.shape.layers
    backward = 1.0 if plan.lora_rank is not None else 2.0
    passes = 1 + share * (backward + plan.checkpointing) + plan.method.forwards
    further = share * (2.5 - backward) * attention_flops(plan, plan.tokens)
    return once * passes + further + 6.0 * memory.adapters(plan) * plan.tokens


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
    return plan.positions * (2.0 * shape.table * products + 6.0 * memory.head_weights(plan) * (not method.qvalue))


def moved_bytes(plan: Plan) -> float:
    """A batch moves through memory, beside products, each number that is kept four times.

    It is written and read, and so is its gradient. Over the vocabulary a logit moves eight times.
    """
    block, trained, all_layers = memory.kept_bytes(plan) * plan.tokens, plan.trained_layers, plan.shape.layers
    kept, frozen = trained * block, (all_layers - trained + plan.method.forwards * all_layers) * block
    logits = plan.positions * plan.shape.vocab * plan.compute_bytes * 8.0 * (1 + 2 * plan.method.qvalue)
    return (4.0 + 2.0 * plan.checkpointing) * kept + 2.0 * frozen + logits * plan.method.trains


def update_bytes(plan: Plan) -> float:
    """The optimizer moves ten numbers a trained weight.

    AdamW reads the weight, its gradient and two moments and writes three; clipping reads the gradient twice and writes
    it. Target copies read two and write one.
    """
    return 10.0 * memory.gradient_bytes(plan) + 3.0 * memory.target_bytes(plan)


def summed_bytes(plan: Plan) -> float:
    """Gradients over the vocabulary are sums of parts, each written to new memory.

    Of the output layer its own, of all pieces where these are computed again, which are summed one by one; of an
    embedding zeros, and of a tied one their sum; of Q heads with a weight for each token two.
    """
    shape, pieces = plan.shape, -(-plan.positions // memory.chunk(plan)) if plan.method.scored else 1
    parts = (2 * pieces - 1) + (2 if shape.tied else 1)
    own_q = plan.method.qvalue and not plan.tied_q
    return plan.head_trains * parts * shape.table * plan.weight_bytes + own_q * 8.0 * memory.q_weights(plan)


def communication_bytes(plan: Plan) -> float:
    """A GPU sends ``2 (G - 1) / G`` of the gradients in a step.

    With FSDP for each batch the weights twice, forward and backward, and the gradients once; value heads once a step.
    """
    share = (plan.gpus - 1) / plan.gpus
    heads = 2 * share * 4.0 * memory.head_weights(plan)
    if plan.shard == "no":
        return 2 * share * memory.trained_bytes(plan) + heads
    weights = plan.shape.parameters * plan.compute_bytes
    gathered = share * 4.0 * (memory.head_weights(plan) + memory.target_head_weights(plan))
    return share * plan.accumulate * (2 * weights + memory.trained_bytes(plan)) + heads + gathered


class Step(NamedTuple):
    """Seconds of a training step, by part; it takes their sum, as nothing is assumed to overlap."""

    products: float
    memory: float
    optimizer: float
    communication: float


def step_seconds(plan: Plan) -> Step:
    """Products over ``flops mfu``, moved bytes over ``bandwidth mbu``; no block takes less than its latency."""
    card, n = plan.hardware, plan.accumulate
    products = n * (trunk_flops(plan) + head_flops(plan)) / (card.flops * plan.mfu)
    moved = n * (moved_bytes(plan) / card.elementwise + summed_bytes(plan) / card.new_memory)
    moved /= card.bandwidth * plan.mbu
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


def token_seconds(plan: Plan) -> float:
    """Seconds in which each game of a GPU gets one token: reading the weights, or computing, whichever takes longer.

    The keys and values of half a row are read as well, and no block takes less than its latency.
    """
    shape, card = plan.shape, plan.hardware
    half = plan.bf16 and plan.dtype == "float32"
    read = memory.model_bytes(plan) * (0.5 if half else 1.0) + memory.cache_bytes(plan) / 2
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
    return sum(acting_seconds(plan)) + steps * sum(step_seconds(plan))


def enough_games(plan: Plan) -> int:
    """Games on a GPU from which on computing takes as long as reading the weights."""
    card, each = plan.hardware, forward_flops(plan, 1) + 2.0 * plan.shape.table
    return round(memory.model_bytes(plan) / (card.bandwidth * plan.mbu) * card.flops * plan.mfu / each)
