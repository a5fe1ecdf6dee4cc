"""An online step, playing and learning by PPO: what it spends outside of the model and of the games."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import median, one_core, row, synchronized
from benchmarks.stopwatch import Stopwatch
from torchrl_lang.envs import LanguageEnv
from torchrl_lang.envs.textworld.engine import require_textworld
from torchrl_lang.envs.textworld.task import TextWorldTask
from torchrl_lang.envs.wordle.task import WordleTask
from torchrl_lang.modules import ValueHead, causal_lm, save_language_model
from torchrl_lang.modules.decoding.model_runner import CachedRunner, LanguageModelRunner
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.algorithms import PPO
from torchrl_lang.recipes.online import OnlineRun, kl_transform, load_initial_policy
from torchrl_lang.recipes.online_algorithms import PPOLearner
from torchrl_lang.recipes.records import write_options
from torchrl_lang.recipes.tasks.base import Task

WORDS, MAX_OUTSIDE = "100", 0.10
OPTIONS: dict[str, int] = {}  # those of the preset
GAMES, QUICK = {"games": 24, "valid": 4, "test": 4}, 3
SMOKE = {
    "OPTIONS": {"games": 8, "epochs": 1},
    "MODEL": {"layers": 1, "width": 16, "heads": 2},
    "GAMES": {"games": 3, "valid": 1, "test": 1},
    "QUICK": 1,
}
MODEL = {"layers": 3, "width": 64, "heads": 4}

# The model: acting, the reference, the loss with its gradients and the optimiser's step.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "acting": [
        (CachedRunner, "prefill"),
        (CachedRunner, "decode"),
        (LanguageModelRunner, "_complete"),
        (ValueHead, "forward"),
    ],
    "reference": [(RowScorer, "states"), (RowScorer, "log_prob")],
    "learning": [(PPOLoss, "forward"), (torch.Tensor, "backward"), (torch.optim.AdamW, "step")],
    "games": [(LanguageEnv, "_step"), (LanguageEnv, "_reset")],
    "choosing words": [(UtteranceActor, "forward")],
}


@one_core()
def run(quick: bool = False) -> list[dict[str, Any]]:
    found = _profile(WordleTask.of(WORDS, "official"), "Wordle", repeats=QUICK if quick else 12)
    try:
        require_textworld()
    except ImportError as error:
        print(f"  TextWorld: nothing measured: {error}")
        return found
    corridors = TextWorldTask.of("coin_collector", options={"level": 5}, **GAMES)
    return found + _profile(corridors, "TextWorld", repeats=QUICK if quick else 6)


def _profile(task: Task, name: str, *, repeats: int) -> list[dict[str, Any]]:
    outside, words, speed, parts = [], [], [], dict.fromkeys(PARTS, 0.0)
    with TemporaryDirectory() as folder:
        loop = _online_run(task, Path(folder))
        try:
            for iteration in range(1, repeats + 2):
                watch, began = Stopwatch(), time.perf_counter()
                with watch.watching(PARTS):
                    figures = loop.iterate(iteration)
                synchronized()
                whole = time.perf_counter() - began
                if iteration == 1:
                    continue  # workers start, buffers are made
                rest = whole - sum(watch.seconds.values())
                outside.append((rest + watch.seconds["choosing words"]) / whole)
                words.append(watch.seconds["choosing words"] / whole)
                speed.append(figures["games"] / whole)
                parts = {part: share + watch.seconds[part] / whole / repeats for part, share in parts.items()}
        finally:
            loop.games.close()
    shares = ", ".join(f"{part} {share:.0%}" for part, share in parts.items())
    note = f"{shares}; the rest is the collector, rows, advantages and batches"
    what = f"online PPO, {name}:"
    return [
        row(f"{what} outside of model and games", median(outside), "", MAX_OUTSIDE, at_most=True, note=note),
        row(f"{what} of it choosing words", median(words), ""),
        row(f"{what} games played and learned from", median(speed), "games/s"),
    ]


def _online_run(task: Task, folder: Path) -> OnlineRun:
    """A run from an untrained model, with the preset of the task."""
    control, size = task.tokenizer().control, task.tokenizer().vocab_size
    length = task.env(1).row_length + task.action_length
    lm = causal_lm(vocab_size=size, max_length=length, pad=control.pad, initializer_range=0.125, **MODEL)
    save_language_model(folder / "start" / "model", lm, tokenizer=task.tokenizer().config())
    options = PPO.for_task(task, start=folder / "start", out=folder / "run", value_warmup=0, **OPTIONS)
    write_options(options.start / "config.json", options, notes=task.notes())
    start = load_initial_policy(options)
    loop = OnlineRun(options, start, kl_transform(options, start), PPOLearner(options, start))
    loop.games.restart(0)
    return loop
