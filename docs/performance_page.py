"""Make ``performance.md`` from the records of ``make bench``: ``python docs/performance_page.py``."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"

# What a reader looks for first: what was measured, its benchmark and its name in the record.
HEADLINES = [
    ("Wordle with 2,300 words: TorchRL steps", "wordle_env", "wordle: env.step, a reset a game"),
    (
        "the same, compiled rollout, two processes of one core each",
        "wordle_env",
        "wordle: compiled rollout, keep='turns', two processes of one core",
    ),
    (
        "a million scripted games written as a dataset",
        "data_pipeline",
        "data: a million games of the mediocre mixture, 100 words",
    ),
    (
        "ILQL step / plain language-model step on the same rows, 4 layers of width 128",
        "training_step",
        "4 layers, 128 wide: ILQL / plain step",
    ),
    ("AgileRL's ILQL step / ours, same rows, layers and width", "rivals", "AgileRL's ILQL step / ours"),
    (
        "step of TorchRL's `DiscreteIQLLoss` on whole networks / ours without CQL",
        "rivals",
        "DiscreteIQLLoss step, a trunk in each network / ours without CQL",
    ),
    ("ILQL step with CQL over 50,257 tokens / plain step", "large_vocabulary", "V=50,257: ILQL, CQL on / plain step"),
    ("the same with tied heads", "large_vocabulary", "V=50,257: ILQL, CQL on, tied heads / plain step"),
    ("its peak memory beyond the plain step's", "large_vocabulary", "V=50,257: peak beyond the plain step, CQL on"),
    ("acting / Hugging Face `generate`, 64 games", "decoding", "acting, batch 64: over generate, plain"),
    ("Wordle games with value guidance, 64 at a time", "decoding", "Wordle, 200 words, batch 64, value-guided"),
    (
        "online PPO on Wordle: share of time outside of model and games",
        "online",
        "online PPO, Wordle: outside of model and games",
    ),
    ("a KL penalty on rows / TorchRL's `RetrieveKL`", "kl_transforms", "penalty: KLConstrainedTransform / TorchRL's"),
]

SECTIONS = {
    "wordle_env": ("Wordle", "A `WordleEnv` with 2,300 words and 4,096 games side by side."),
    "data_pipeline": ("Datasets and replay", "Writing, reading and sampling rows."),
    "training_step": (
        "A training step",
        "ILQL and BC against a plain language-model step of the same model on the same rows. ILQL costs less than the "
        "plain step because a batch runs in groups of similar length, no row is read beyond the last state that the "
        "loss needs, and heads are computed only at decisions.",
    ),
    "rivals": (
        "Other implementations",
        "AgileRL runs in an environment of its own with its pinned versions. `DiscreteIQLLoss` is TorchRL's.",
    ),
    "large_vocabulary": (
        "Large vocabularies",
        "Time and peak memory of a step over 50,257 and 151,936 tokens. *Naive* computes all tables of values; *whole "
        "table* is `logits_chunk=None`.",
    ),
    "decoding": (
        "Acting",
        "Each turn reads only its new tokens. A turn in Wordle (five letters and an end) is one call that reads the "
        "new tokens and four calls of one token, which read the keys and values of the whole rows again. This traffic "
        "of memory is why small batches stay below a plain forward pass and why later turns cost more.",
    ),
    "chat_model": (
        "A chat model",
        "SmolLM2-135M-Instruct after BC on the guessing game, float32, beside transformers and TRL 1.16: same rows and "
        "weights; three repetitions, while the other core worked. Linear layers are those that each side loads: ours "
        "multiply by oneDNN, which halves their time on this processor. *LoRA*: BC with adapters on all layers, PPO "
        "and GRPO on the last six blocks. TRL does not see that a game is over and plays all turns, so its games have "
        "more tokens.",
    ),
    "online": ("Online steps", "The share of an iteration that is neither the model nor the games."),
    "textworld_env": ("TextWorld", "Its engine runs in processes of its own."),
    "visual_dialogue_server": (
        "The server of visual dialogue",
        "A server process with the small trained models, and clients on the same core. A scored question is a request "
        "for an answer and the percentile that it leads to.",
    ),
    "ad_rollout": (
        "Acting in context",
        "A model of algorithm distillation with a rolling context of 160 steps: keys and values cached, or the whole "
        "context read at each step.",
    ),
    "ad_sources": (
        "Source algorithms",
        "Learning histories of tabular algorithms, all tasks and streams in one batch: 81 goals of a dark room of 9 by "
        "9 in 100 streams, 1,000 bandits with ten arms in eight.",
    ),
    "kl_transforms": (
        "KL transforms",
        "TorchRL's transforms need its wrappers around Qwen2 or Llama and lazily stacked data, so the comparison uses "
        "these on one batch of 64 Wordle rows. *Scoring / forward*: log-probabilities of whole rows under the "
        "reference, against one plain forward pass.",
    ),
    "plan_check": (
        "Predictions of `plan`",
        "How far what `plan` computes is from the peak of all tensors and from the processor time of a step on 256 "
        "tokens, and of an utterance of 16 tokens in eight games; medians of five, each beside a prediction for the "
        "rates of that moment.",
    ),
    "scaling": (
        "Scaling",
        "The curves below, over vocabulary, row length, batch size and number of environments, and slopes of them.",
    ),
}

INTRO = """# Performance

This page is made from the records of `make bench` (`benchmarks/results/*.json`) by `docs/performance_page.py`.

Values are medians, in brackets the quartiles. A ratio compares neighbouring runs in one process: it varies less than
speeds, which change by a quarter from hour to hour on a shared machine. Unless a section states otherwise, one core was
used. "Target" is what the benchmark demands; a value that misses it is marked.

To measure on your machine: `make bench` (all, with AgileRL in an environment of 1.3 GB) or `make bench ARGS="--quick
training_step"`.
"""


# The same of the benchmarks that were run on a GPU.
ON_GPU = [
    (
        "ILQL step / plain language-model step, 4 layers of width 128",
        "training_step",
        "4 layers, 128 wide: ILQL / plain step",
    ),
    (
        "ILQL step with CQL / plain step, GPT-2 small, 50,257 tokens",
        "large_vocabulary",
        "GPT-2 small, V=50,257: ILQL, CQL on / plain step",
    ),
    (
        "acting in 256 games: all rows read again each turn / the prefix cache",
        "decoding",
        "acting: rereading all rows each turn / prefix reuse, time",
    ),
    ("steps of 65,536 Wordle environments", "scaling", "65,536 envs: env.step"),
]
GPU_TEXT = """The targets are those of a CPU, and such small models do not fill this card: their time hardly depends on
batch and vocabulary. All rows: `benchmarks/results/cuda/table.md`."""


def page() -> str:
    """The page's text."""
    records = {name: _record(RESULTS, name) for name in SECTIONS}
    on_gpu = {name: _record(RESULTS / "cuda", name) for _, name, _ in ON_GPU}
    parts = [INTRO, _chosen(HEADLINES, records), "## On a GPU", GPU_TEXT]
    parts += [_machine(next(iter(on_gpu.values()))["machine"]), _chosen(ON_GPU, on_gpu)]
    for name, (title, text) in SECTIONS.items():
        rows = records[name]["rows"]
        parts += [f"## {title}", text, _machine(records[name]["machine"]), _table([(r["name"], r) for r in rows])]
        parts += [f"*{row['name']}*: {row['note']}" for row in rows if "note" in row]
        pictures = [row["figure"] for row in rows if "figure" in row]
        parts += [f"![{f['title']}](../benchmarks/results/{f['name']}.png)" for f in pictures]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _record(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def _chosen(chosen: list[tuple[str, str, str]], records: dict[str, dict]) -> str:
    """The table of some rows of the records."""
    entries = {(name, row["name"]): row for name, found in records.items() for row in found["rows"]}
    return _table([(what, entries[name, row]) for what, name, row in chosen])


def _machine(machine: dict) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "torchrl", "transformers"))
    return f"Measured on {machine.get('device', machine['processor'])}; {versions}."


def _table(rows: list[tuple[str, dict]]) -> str:
    lines = ["| what | measured | target |", "|---|---|---|"]
    for what, row in rows:
        missed = " (missed)" if row["ok"] is False else ""
        target = "" if row["target"] is None else f"{_bound(row)} {_number(row['target'])}{missed}"
        lines.append(f"| {what.replace('|', '/')} | {_value(row)} | {target} |")
    return "\n".join(lines)


def _bound(row: dict) -> str:
    """Whether the target is an upper or a lower bound: seen from a value that meets it, or misses it."""
    return "≤" if (row["value"] <= row["target"]) == bool(row["ok"]) else "≥"


def _value(row: dict) -> str:
    spread = f" [{_number(row['low'])}, {_number(row['high'])}]" if "low" in row else ""
    unit = {"x": "x", "": ""}.get(row["unit"], f" {row['unit']}")
    return f"{_number(row['value'])}{unit}{spread}"


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    (HERE / "performance.md").write_text(page(), encoding="utf-8")
