"""``plan``: memory and time of training and acting in a table, and what to choose. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

from torchrl_lang.recipes.options import dashed
from torchrl_lang.recipes.planning import memory, times
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
    step = times.step_seconds(plan)
    names = {"products": "matrix products", "memory": "moving activations", "optimizer": "optimizer and targets"}
    rows = [(names.get(name, name), value) for name, value in step._asdict().items() if value]
    return [*rows, ("all", step.total), ("tokens a second, all GPUs", plan.batch_size * plan.row_length / step.total)]


def _iteration_rows(plan: Plan) -> list[tuple[str, float]]:
    games = times.acting_seconds(plan)
    names = {"reading": "reading the environment's tokens", "writing": "writing the agent's tokens"}
    rows = [(names.get(name, name), value) for name, value in games._asdict().items() if value]
    total = times.iteration_seconds(plan)
    return [*rows, (f"steps of {plan.epochs} epochs", total - games.total), ("all", total)]


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
        return each.lora_rank is not None, -bits[0], -bits[1], times.iteration_seconds(each) * slower

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
    return f"{memory.peak(plan) / GB:.3g} GB, {_short(times.iteration_seconds(plan))} s {what}"


def _of_precision(plan: Plan) -> Iterator[str]:
    if plan.compute_bytes == 4 and plan.card != "CPU-core":
        faster = times.iteration_seconds(plan) / times.iteration_seconds(replace(plan, bf16=True, flops=None))
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
    share = times.acting_seconds(plan).writing / times.iteration_seconds(plan)
    games, enough = plan.played, times.enough_games(plan)
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
            fits, seconds = memory.fits(found), times.iteration_seconds(found)
            speed = (found.games if found.online else found.batch_size) * found.row_length / seconds
            rest = (_short(seconds), _short(speed)) if fits else ("-", "-")
            options = changes(sized, found) or "-" if fits else "does not fit"
            lines.append((model, str(gpus), options, f"{memory.peak(found) / GB:.3g}", *rest))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
