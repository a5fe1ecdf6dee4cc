"""Undamaged originals of everything that the library reads, tiny; and what a user does with each."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.campaigns import commands, snapshots
from tests.campaigns.snapshots import Remembered, Snapshot
from tests.text.test_hf_tokenizer import word_level
from torchrl_lang.data import dataset_from_jsonl
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import HFTokenizer


@dataclass(frozen=True)
class Use:
    """One thing that a user does with a file or folder."""

    name: str
    command: Callable[[Path], list[object]] | None
    """Gets the folder; ``None`` where the use is a call of the Python API."""
    read: Callable[[Path], Snapshot]
    """What was read of the folder, or what the command made of it."""
    original: Snapshot = field(default_factory=dict)
    fallback: Snapshot | None = None
    """What may be read instead, where a warning says so or the user has deleted a whole folder."""


@dataclass
class Artifact:
    """A folder, and how it is used."""

    name: str
    folder: Path
    uses: list[Use]
    cost: int = 1
    """How long it takes to use it, roughly: cheap ones are attacked more often."""
    checked: bool = True
    """Everything in it is protected by checksums. Folders of other libraries are not: only their structure can be."""

    def files(self) -> list[Path]:
        """Relative paths of its files."""
        found = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        # Transformers reads a foreign generation_config.json where it can, and does without it where it cannot.
        return [path for path in found if self.checked or path.name != "generation_config.json"]


def build(home: Path) -> list[Artifact]:
    """Make all artifacts below ``home``."""
    home.mkdir(parents=True)
    words = home / "words.txt"
    words.write_text("crane\nslate\npurge\nmouse\n")
    data, finished = home / "data", home / "ilql"
    _do(commands.generate(data, words))
    _do(commands.train("ilql", data, finished, "--seed", 3))
    artifacts = [
        _dataset(data),
        _chat(home),
        *_finished(home, finished),
        _half(home, "bc", lambda folder: commands.train("bc", data, folder)),
        _half(home, "ppo", lambda folder: commands.train_online("ppo", finished, folder)),
        _checkpoints(home),
        _pretrained(home, data),
    ]
    for artifact in artifacts:
        artifact.uses = [_with_original(use, artifact, home / "originals") for use in artifact.uses]
    return artifacts


def _do(command: list[object]) -> None:
    ended = commands.call(command)
    if ended.status != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {ended.status}:\n{ended.err}")


def _with_original(use: Use, artifact: Artifact, scratch: Path) -> Use:
    """The use with what it finds in the undamaged folder, of which it gets a copy: commands write into it."""
    copy = scratch / artifact.name
    shutil.copytree(artifact.folder, copy)
    if use.command is not None:
        _do(use.command(copy))
    found = use.read(copy)
    shutil.rmtree(scratch)
    return replace(use, original=found)


LOADED = [
    Use("load_dataset", None, snapshots.dataset),
    Use("load_dataset(verify=True)", None, snapshots.verified_dataset),
]


def _dataset(data: Path) -> Artifact:
    def train(folder: Path) -> list[object]:
        return commands.train("bc", folder, folder.with_name("out"))

    used = Use("train bc --data", train, lambda folder: snapshots.results(folder.with_name("out")))
    return Artifact("dataset", data, [*LOADED, used])


def _chat(home: Path) -> Artifact:
    """A dataset with a Hugging Face tokenizer, whose rows are of several lengths."""
    tokenizer = HFTokenizer(word_level(), control={"end_of_action": "<|end_of_action|>"})
    draw, path = random.Random(0), home / "chat.jsonl"
    with path.open("w") as file:
        for index in range(12):
            said, answer = draw.choice(["is it red", "red", "is it it red"]), draw.choice(["is", "it"])
            turns = [{"role": "agent", "text": said, "reward": -index}, {"role": "user", "text": answer}]
            print(json.dumps({"turns": [{"role": "user", "text": "it is"}, *turns]}), file=file)
    dataset_from_jsonl(path, home / "chat", tokenizer, 16)
    return Artifact("chat dataset", home / "chat", LOADED)


def _finished(home: Path, finished: Path) -> list[Artifact]:
    def start(folder: Path) -> list[object]:
        return commands.train_online("ppo", folder, folder.with_name("out"), "--iterations", 2, "--eval-every", 2)

    run = home / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints")
    uses = [
        Use("load_run", None, snapshots.run),
        Use("load_language_model", None, snapshots.run_model),
        Use("evaluate", lambda folder: commands.evaluate(folder, "--beta", 0, 2), snapshots.evaluation),
    ]
    started = Use("train ppo --start", start, lambda folder: snapshots.results(folder.with_name("out")))
    return [Artifact("run", run, uses), Artifact("run as start", run, [started], cost=4)]


def _half(home: Path, name: str, command: Callable[[Path], list[object]]) -> Artifact:
    """A run that was killed before its last checkpoint; the same command goes on."""
    folder = home / f"half-{name}"
    _do(command(folder))
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "step-000000003")
    bereft = home / f"bereft-{name}"
    shutil.copytree(folder, bereft)
    # It is there if it is the best one; of equals the best is the latest.
    shutil.rmtree(bereft / "checkpoints" / "step-000000001", ignore_errors=True)
    _do(command(bereft))
    use = Use("the same train command", command, snapshots.results, fallback=snapshots.results(bereft))
    return Artifact(f"half {name} run", folder, [use], cost=3)


def _checkpoints(home: Path) -> Artifact:
    folder = home / "checkpoints"
    Remembered(1).checkpointer(folder).save(1, {"return": -1.0})
    before = snapshots.checkpoints(folder)
    Remembered(2).checkpointer(folder).save(2, {"return": -2.0})
    use = Use("Checkpointer.restore", None, snapshots.checkpoints, fallback=before)
    return Artifact("checkpoints", folder, [use])


def _pretrained(home: Path, data: Path) -> Artifact:
    """A folder that another library wrote, with another vocabulary."""
    folder = home / "pretrained"
    causal_lm("llama", vocab_size=50, layers=1, width=8, heads=2, max_length=128).save_pretrained(folder)

    def train(path: Path) -> list[object]:
        return [*commands.train("bc", data, path.with_name("out")), "--pretrained", path]

    trained = Use("train bc --pretrained", train, lambda path: snapshots.results(path.with_name("out")))
    uses = [Use("load_language_model", None, snapshots.model), trained]
    return Artifact("foreign model", folder, uses, cost=2, checked=False)
