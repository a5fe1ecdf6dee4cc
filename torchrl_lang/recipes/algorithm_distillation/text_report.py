"""What a model of text histories predicts on episodes that were held out, beside a constant prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential

from torchrl_lang.algorithm_distillation.language import next_token_metrics, reward_accuracy
from torchrl_lang.evaluation.tables import format_columns
from torchrl_lang.recipes.algorithm_distillation.text_histories import TextHistories, TextHistoryOptions

__all__ = ["format_text_report", "text_report"]

_FIGURES = ("exact", "within_one", "rank_correlation", "squared_error")


def text_report(
    options: TextHistoryOptions, histories: TextHistories, actor: ProbabilisticTensorDictSequential, *, chunk: int
) -> dict[str, Any]:
    """The figures of the held-out rows, and which those are, as JSON.

    Args:
        options: of the histories.
        histories: with rows on the device of the model.
        actor: the model.
        chunk: rows that it reads at a time.
    """
    rows, template, tokenizer, values = histories[:4]
    share = f"a random {100 * options.test:g} % of each epoch's episodes"
    return {
        "held_out": f"all episodes of {', '.join(options.test_runs)}" if options.test_runs else share,
        "block": options.block,
        "reward": options.reward,
        "histories": histories.about,
        "rewards": reward_accuracy(actor, rows.test, template, tokenizer, values=values, chunk=chunk),
        "tokens": next_token_metrics(actor, rows.test, chunk=chunk),
    }


def format_text_report(report: Mapping[str, Any]) -> str:
    """The report as tables."""
    rewards, tokens, part = report["rewards"], report["tokens"], report["histories"]["test"]
    lines = [["reward", "model", "constant"]]
    for name in _FIGURES:
        constant = rewards.get(f"constant_{name}")
        cells = [name.replace("_", " "), f"{rewards[name]:.3f}", "-" if constant is None else f"{constant:.3f}"]
        lines.append(cells)
    kinds = ["", *(f"/{key.removeprefix('loss/')}" for key in tokens if key.startswith("loss/"))]
    by_kind = [["next token", "loss", "accuracy"]]
    by_kind += [
        [kind[1:] or "all", f"{tokens['loss' + kind]:.3f}", f"{tokens['accuracy' + kind]:.3f}"] for kind in kinds
    ]
    held_out = f"Held out: {report['held_out']}: {part['episodes']} episodes, {part['blocks']} blocks."
    return "\n\n".join([held_out, format_columns(lines, "<>>"), format_columns(by_kind, "<>>")])
