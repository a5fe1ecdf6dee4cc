"""``plan``: memory and time of training and acting in a table, and what to choose. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchrl_lang.recipes import costs
from torchrl_lang.recipes.costs import BYTES, GB, Plan

SIZES = ("GPT-2", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
NUMBERS = (1, 8, 64)
"""Models and numbers of GPUs of ``--sizes``."""


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
    head = f"{name}: {shape.parameters / 1e9:.3g} B parameters, {width}; {plan.algorithm} on {plan.gpus} x {plan.card}"
    found = "fits" if costs.fits(plan) else "does NOT fit"
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
    parts = {name.replace("_", " "): value for name, value in costs.memory(plan)._asdict().items() if value}
    peaks = {"at most, learning": costs.learning_peak(plan), "at most, acting": costs.acting_peak(plan)}
    return [(name, value / GB) for name, value in (parts | peaks).items() if value]


def _step_rows(plan: Plan) -> list[tuple[str, float]]:
    step = costs.step_seconds(plan)
    names = {"products": "matrix products", "memory": "moving activations", "optimizer": "optimizer and targets"}
    rows = [(names.get(name, name), value) for name, value in step._asdict().items() if value]
    return [*rows, ("all", step.total), ("tokens a second, all GPUs", plan.batch_size * plan.row_length / step.total)]


def _iteration_rows(plan: Plan) -> list[tuple[str, float]]:
    games = costs.acting_seconds(plan)
    names = {"reading": "the environment's tokens", "writing": "the agent's tokens", "reference": "reference"}
    rows = [(names[name], value) for name, value in games._asdict().items() if value]
    total = costs.iteration_seconds(plan)
    return [*rows, (f"steps of {plan.epochs} epochs", total - games.total), ("all", total)]


# -- what to choose ----------------------------------------------------------------------------------------------------


def choose(plan: Plan) -> tuple[list[str], Plan]:
    """Options that make a plan fit, the cheapest first, and the plan with them; it may still not fit.

    All weights are tried before adapters, and these with the model in bfloat16 before 8 or 4 bits.
    """
    if plan.lora_rank is not None:
        return _ladder(plan, _adapter_steps(plan))
    found = _ladder(plan, _weight_steps(plan))
    if costs.fits(found[1]) or not plan.method.trains:
        return found
    adapted = replace(plan, lora_rank=16, dtype="bfloat16", top_layers=None)
    words, found_plan = _ladder(adapted, _adapter_steps(adapted))
    return ["--lora-rank 16 --dtype bfloat16", *words], found_plan


Steps = Iterator[tuple[str, dict[str, Any]]]


def _shared_steps(plan: Plan) -> Steps:
    for number in (2**n for n in range(1, 11)):
        if plan.accumulate < number <= max(plan.batch_size // plan.gpus, 1):
            yield f"--accumulate {number}", {"accumulate": number}
    if plan.gpus > 1:
        yield "--shard model", {"shard": "model"}
    yield "--checkpointing", {"checkpointing": True}


def _weight_steps(plan: Plan) -> Steps:
    if plan.method.qvalue:
        yield "--q-head tied", {"q_head": "tied"}
    yield from _shared_steps(plan)
    if plan.method.reference:
        yield "--reference-dtype bfloat16", {"reference_dtype": "bfloat16"}
        if plan.gpus > 1:
            yield "--shard all", {"shard": "all"}
        yield "--reference-dtype int8", {"reference_dtype": "int8"}
        yield "--reference-dtype int4", {"reference_dtype": "int4"}


def _adapter_steps(plan: Plan) -> Steps:
    yield from _shared_steps(plan)
    yield "--quantize int8", {"quantize": "int8"}
    yield "--quantize int4", {"quantize": "int4"}


def _ladder(plan: Plan, steps: Steps) -> tuple[list[str], Plan]:
    """Change options one after another until the plan fits; those that save less than a hundredth are left out."""
    taken: dict[str, str] = {}
    for words, change in steps:
        if costs.fits(plan):
            break
        changed = replace(plan, **change)
        if costs.peak(changed) < 0.99 * costs.peak(plan):
            plan, taken[words.split()[0]] = changed, words  # a later value of an option replaces the earlier one
    return [*taken.values()], plan


def advice(plan: Plan) -> list[str]:
    """What to choose, in sentences with figures."""
    words, chosen = choose(plan)
    if not costs.fits(chosen):
        yet = f"it needs {costs.peak(chosen) / GB:.3g} GB"
        lines = [f"It does not fit, whatever is chosen: with {' '.join(words)} {yet}. More GPUs, or shorter rows."]
    elif words:
        lines = [f"It fits with {' '.join(words)}: {_figures(chosen)}."]
    else:
        lines = [f"It fits as it is: {_figures(plan)}."]
    return [*lines, *_of_precision(plan), *_of_parts(plan), *_of_acting(chosen)]


def _figures(plan: Plan) -> str:
    what = "an iteration" if plan.online else "a step"
    return f"{costs.peak(plan) / GB:.3g} GB, {_short(costs.iteration_seconds(plan))} s {what}"


def _of_precision(plan: Plan) -> Iterator[str]:
    if plan.compute_bytes == 4 and plan.card != "CPU-core":
        faster = costs.iteration_seconds(plan) / costs.iteration_seconds(replace(plan, bf16=True, flops=None))
        yield f"--bf16 computes in bfloat16 with weights in float32: {faster:.2g} times as fast."
    if plan.weight_bytes == 2 and plan.lora_rank is None and plan.method.trains:
        yield "Weights that train in half precision lose small updates: --dtype float32 --bf16, or --lora-rank."


def _of_parts(plan: Plan) -> Iterator[str]:
    if plan.method.qvalue and not plan.tied_q:
        own, tied = (costs.q_weights(plan, tied) / 1e6 for tied in (False, True))
        if own > 2 * tied:
            yield f"A QValueHead has {own:,.0f} M weights, and as many in its target; a TiedQValueHead {tied:,.0f} M."
    parts = costs.memory(plan)
    if plan.method.target_model:
        yield f"{plan.algorithm} keeps three models; targets and reference have {(parts[2] + parts[3]) / GB:.3g} GB."
    elif parts.reference > 0.1 * costs.peak(plan):
        less = replace(plan, reference_dtype="int8")
        yield (
            f"The reference has {parts.reference / GB:.3g} GB, in 8 bits {costs.reference_bytes(less) / GB:.3g}; beside "
            "adapters none, and beside --top-layers only what trains."
        )


def _of_acting(plan: Plan) -> Iterator[str]:
    if not plan.online:
        return
    share = costs.acting_seconds(plan).writing / costs.iteration_seconds(plan)
    games, enough = -(-plan.games // plan.gpus), costs.enough_games(plan)
    if share > 0.5:
        yield (
            f"Writing takes {share:.0%} of an iteration, {plan.agent_share * plan.row_length:,.0f} tokens one after "
            "another: an inference engine on GPUs of its own writes while this trains."
        )
    if games < enough:
        most = int((plan.hardware.memory * 0.9 - costs.acting_peak(plan)) / (costs.cache_bytes(plan) / games)) + games
        yield f"{games} games on a GPU write as slowly as {min(enough, max(most, games)):,} would: play more at a time."
    if plan.shard != "no":
        yield (
            f"Acting gathers the whole model on each GPU, {costs.model_bytes(plan) / GB:.3g} GB: play in an engine of "
            "its own where that does not fit."
        )


# -- typical sizes -----------------------------------------------------------------------------------------------------


def sizes(plan: Plan) -> str:
    """A line for each of :data:`SIZES` and :data:`NUMBERS`: what makes it fit, with its memory and time."""
    lines = [("model", "GPUs", "options", "GB", "s")]
    for model in SIZES:
        for gpus in NUMBERS:
            words, found = choose(replace(plan, model=model, gpus=gpus))
            figures = (f"{costs.peak(found) / GB:.3g}", _short(costs.iteration_seconds(found)))
            lines.append((model, str(gpus), " ".join(words) or "-", *figures) if costs.fits(found) else (model, str(gpus), "does not fit", figures[0], "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
