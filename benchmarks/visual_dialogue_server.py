"""Visual dialogue over HTTP: scored questions a second in batches and of many clients, the time of one request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import interleaved, median, one_core, ratio, row, smoking
from torchrl_lang.envs.visual_dialogue import (
    Dialogue,
    DialogueServer,
    LocalDialogueModels,
    RemoteModels,
    VisualDialogues,
    generate_visual_dialogues,
    train_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.dialogue import DialogueModels, answer_and_score

BATCH, CLIENTS, POOL, MIN_SPEED = 32, 64, 1000, 200
QUICK_TRAIN, EPOCHS = 300, {"guesser_epochs": 2, "answerer_epochs": 4}
SMOKE = {"BATCH": 1, "CLIENTS": 2, "POOL": 10, "QUICK_TRAIN": 12, "EPOCHS": {"guesser_epochs": 1, "answerer_epochs": 1}}
Questions = tuple[list[Dialogue], list[str], torch.Tensor]


@one_core()  # one for the client and one for the server
def run(quick: bool = False) -> list[dict[str, Any]]:
    with TemporaryDirectory() as home:
        data = _prepared(Path(home), quick)
        local = LocalDialogueModels(home + "/models", data.features.all())
        with DialogueServer(local) if smoking() else _serving(home + "/models", data.features.path) as server:
            return _measure(RemoteModels(server.url), local, _questions(data), repeats=5 if quick else 40)


def _prepared(home: Path, quick: bool) -> VisualDialogues:
    """Small models in ``home/models``, trained until answers have the length of those in the data."""
    generate_visual_dialogues(home / "data", {"train": QUICK_TRAIN if quick else 1500, "val": POOL}, npy=True)
    train, val = (VisualDialogues.in_folder(home / "data", split) for split in ("train", "val"))
    train_dialogue_models(train.dialogues, train.features, **EPOCHS).save(home / "models")
    return val


@contextmanager
def _serving(models: str, features: Path) -> Iterator[SimpleNamespace]:
    """A server in a process of its own, with its address."""
    command = [sys.executable, "-m", "torchrl_lang", "serve", "visual_dialogue", "--port", "0"]
    command += ["--models", models, "--features", str(features)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert found is not None, "the server did not start"
            yield SimpleNamespace(url=found[0])
        finally:
            process.terminate()


def _questions(data: VisualDialogues) -> Questions:
    """Questions of the data, each after the rounds before it: of dialogue ``i`` question ``i % 10``."""
    rows = range(len(data))
    rounds = [dialogue.rounds for dialogue in data.dialogues]
    dialogues = [data.dialogues[i].first(i % 10) for i in rows]
    return dialogues, [rounds[i][i % 10].question for i in rows], data.features.rows(rows)


def _part(questions: Questions, first: int, count: int) -> Questions:
    return tuple(column[first : first + count] for column in questions)  # type: ignore[return-value]


def _measure(remote: RemoteModels, local: DialogueModels, questions: Questions, repeats: int) -> list[dict[str, Any]]:
    batches = [_part(questions, first, BATCH) for first in range(0, 8 * BATCH, BATCH)]

    def ask(models: DialogueModels) -> None:
        for batch in batches:
            answer_and_score(models, *batch)

    times = interleaved({"HTTP": lambda: ask(remote), "in process": lambda: ask(local)}, max(3, repeats // 4))
    alone = [_single(remote, questions, number) for number in range(POOL // 5 if repeats < 10 else POOL)]
    together, seconds = _clients(remote, questions, repeats)
    asked, features = len(batches) * BATCH, questions[2].shape[1]
    what = f"visual dialogue over HTTP, {features} features:"
    note = f"Of {len(alone)} requests by one client; of {len(together)} by {CLIENTS} threads of one client process."
    return [
        row(f"{what} scored questions in batches of {BATCH}", _speed(asked, times["HTTP"]), "/s", MIN_SPEED),
        row(f"{what} the same over models in process, speed", ratio(times, "in process", "HTTP"), "x"),
        row(f"{what} one question, median time", _percentile(alone, 0.5), "ms"),
        row(f"{what} one question, 99th percentile", _percentile(alone, 0.99), "ms", note=note),
        row(f"{what} {CLIENTS} clients, one question a request", len(together) / seconds, "/s"),
        row(f"{what} {CLIENTS} clients, median time", _percentile(together, 0.5), "ms"),
        row(f"{what} {CLIENTS} clients, 99th percentile", _percentile(together, 0.99), "ms"),
    ]


def _speed(count: int, times: list[float]) -> float:
    return median(count / seconds for seconds in times)


def _single(remote: RemoteModels, questions: Questions, number: int) -> float:
    began = time.perf_counter()
    answer_and_score(remote, *_part(questions, number % POOL, 1))
    return time.perf_counter() - began


def _clients(remote: RemoteModels, questions: Questions, repeats: int) -> tuple[list[float], float]:
    """Times of requests of many clients at once, and the seconds that all took."""
    together = threading.Barrier(CLIENTS)

    def client(number: int) -> list[float]:
        together.wait()
        return [_single(remote, questions, number + CLIENTS * turn) for turn in range(repeats)]

    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        times = [each for of_one in pool.map(client, range(CLIENTS)) for each in of_one]
    return times, time.perf_counter() - began


def _percentile(times: list[float], fraction: float) -> float:
    """In milliseconds."""
    return float(torch.tensor(times, dtype=torch.float64).quantile(fraction)) * 1000
