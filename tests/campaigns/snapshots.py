"""What was loaded, as a flat dict: two of them say whether a damaged copy was read as the original."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.data import RowDataset, load_dataset
from torchrl_lang.modules import load_language_model
from torchrl_lang.modules.save import SavedModel
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.training import Checkpointer, RandomState

Snapshot = dict[str, Any]

RECORDS = ("created_by", "versions", "transformers_version", "_name_or_path")
"""Fields that say who wrote a file; nobody computes with them."""


def differences(found: Snapshot, original: Snapshot) -> list[str]:
    """Names of what differs."""
    return [name for name in {**original, **found} if not _same(found.get(name), original.get(name))]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return type(left) is type(right) and left == right


def flat(value: Any, name: str = "") -> Snapshot:
    """Leaves of nested dicts and lists by path."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items() if key not in RECORDS]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {name: value}
    found = {name: f"{type(value).__name__} of {len(items)}"}
    for key, item in items:
        found |= flat(item, f"{name}.{key}" if name else key)
    return found


def of_dataset(dataset: RowDataset) -> Snapshot:
    """All rows, the tokenizer, the manifest."""
    rows = dict(dataset[torch.arange(len(dataset))].items())
    return flat({"rows": rows, "tokenizer": dataset.tokenizer.config(), "manifest": dict(dataset.manifest)})


def dataset(folder: Path) -> Snapshot:
    return of_dataset(load_dataset(folder))


def verified_dataset(folder: Path) -> Snapshot:
    return of_dataset(load_dataset(folder, verify=True))


def of_model(model: SavedModel) -> Snapshot:
    """All weights, what the configuration makes of them, the tokenizer."""
    tokens = torch.arange(24).reshape(2, 12) % model.lm.config.vocab_size
    with torch.no_grad():
        logits = model.lm(tokens).logits
    heads = {
        name: {"class": type(head).__name__, "config": head.config(), "weights": head.state_dict()}
        for name, head in model.heads.items()
    }
    lm: dict[str, Any] = {"weights": model.lm.state_dict(), "config": model.lm.config.to_dict(), "logits": logits}
    if model.lm.generation_config is not None:
        lm["generation"] = model.lm.generation_config.to_dict()
    return flat({"lm": lm, "heads": heads, "tokenizer": model.tokenizer, "trains": model.lm.training})


def model(folder: Path) -> Snapshot:
    return of_model(load_language_model(folder))


def run_model(folder: Path) -> Snapshot:
    return model(folder / "model")


def run(folder: Path) -> Snapshot:
    found = load_run(folder)
    return of_model(found.model) | flat(found.tokenizer.config(), "reads") | flat(found.task.notes(), "task")


def results(folder: Path) -> Snapshot:
    """A finished run, and the last row of its log: nobody computes with what earlier rows say."""
    with (folder / "log.csv").open(newline="") as file:
        *_, last = csv.DictReader(file)
    return run(folder) | flat({key: cell for key, cell in last.items() if cell and "seconds" not in str(key)}, "log")


def evaluation(folder: Path) -> Snapshot:
    """What ``evaluate`` wrote."""
    figures = json.loads((folder / "evaluation.json").read_text())
    return flat(figures, "figures") | {"transcripts": (folder / "transcripts.txt").read_text()}


class Remembered:
    """Objects of every kind that a checkpoint may hold, in a state that depends on ``step``."""

    def __init__(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.model, self.random = nn.Linear(3, 2), RandomState(words=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 / (1 + step))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for _ in range(step):
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()

    def checkpointer(self, folder: Path) -> Checkpointer:
        checkpoints = Checkpointer(folder)
        for name in ("model", "optimizer", "random"):
            checkpoints.register(name, getattr(self, name))
        return checkpoints

    def state(self) -> Snapshot:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer")}
        return flat(parts) | {"stream": self.random.generators["words"].get_state()}


def checkpoints(folder: Path) -> Snapshot:
    """What the latest checkpoint restores, and what the best one says of itself."""
    objects = Remembered(0)
    found = objects.checkpointer(folder)
    step = found.restore()
    return objects.state() | {"step": step} | flat(found.metrics(), "metrics")
