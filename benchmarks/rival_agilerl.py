"""AgileRL's ILQL beside ours: its virtual environment, what it is handed, and the process that takes its steps."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_lang.schema import ROW_KEYS, TERMINATED

FOLDER = Path(__file__).parents[1] / ".venv-agilerl"
WORKER = Path(__file__).with_name("rival_agilerl_worker.py")
# AgileRL and its namespace come without their dependencies, most of which other algorithms need; ILQL's import needs
# those below. AgileRL pins its tensordict, and TorchRL another one.
AGILERL = ("agilerl==2.58.0", "agilerl-arena==1.29.0")
NEEDED = (
    "accelerate==1.15.0",
    "dill==0.4.1",
    "fastrand==3.1.0",
    "gymnasium==1.4.0",
    "lazy-loader==0.6",
    "numpy==2.4.6",
    "packaging==26.3",
    "peft==0.21.2",
    "pettingzoo==1.26.1",
    "pillow==13.0.0",
    "pydantic==2.14.3",
    "tensordict==0.13.0",
    "tqdm==4.70.1",
    "transformers==5.23.0",
    "wandb==0.31.0",
)


class Unavailable(RuntimeError):
    """AgileRL cannot be installed or does not start here."""


def torch_requirement() -> str:
    """The very release of PyTorch that runs here, whichever build of it the package index has for this machine."""
    return f"torch=={torch.__version__.partition('+')[0]}"


def installed(folder: Path = FOLDER) -> bool:
    """Whether the environment is there, complete and of the versions above."""
    stamp = folder / ".installed"
    return stamp.exists() and stamp.read_text() == _pins()


def install(folder: Path = FOLDER) -> Path:
    """Python of the environment, which is made if need be: about 1.3 GB from the package index, a minute or two.

    Raises:
        Unavailable: it cannot be made, for example without a network.
    """
    python = folder / "bin" / "python"
    if installed(folder):
        return python
    print(f"  making AgileRL's environment in {folder}", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    (folder / ".gitignore").write_text("*\n")
    pip = str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
    _run(*pip, torch_requirement())  # first, so that nothing pulls in another build
    _run(*pip, "--no-deps", *AGILERL)
    _run(*pip, torch_requirement(), *NEEDED)
    (folder / ".installed").write_text(_pins())
    return python


def _pins() -> str:
    return "\n".join((torch_requirement(), *AGILERL, *NEEDED))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines()
        raise Unavailable(f"{command[2]} failed: {lines[-1] if lines else error}") from error
    except OSError as error:
        raise Unavailable(str(error)) from error


def hand_over(batches: Sequence[TensorDictBase], sizes: dict[str, int], folder: Path) -> None:
    """Write the rows, an ``.npy`` file each entry, and the model's sizes, for the worker to read."""
    for number, batch in enumerate(batches):
        (folder / str(number)).mkdir()
        for key in (*ROW_KEYS, TERMINATED):
            np.save(folder / str(number) / f"{key}.npy", batch[key].numpy(), allow_pickle=False)
    (folder / "sizes.json").write_text(json.dumps(sizes | {"batches": len(batches)}))


class AgileRL:
    """AgileRL's ILQL in its own process, on one thread: a context manager whose ``losses`` and ``step`` wait for it.

    Args:
        batches: the rows it learns from.
        sizes: ``vocabulary``, ``pad``, ``layers``, ``width``, ``heads``, ``max_length``.
        python: of the environment that has AgileRL.
        worker: the program that it runs.

    Raises:
        Unavailable: it does not start.
        RuntimeError: it has not read the same rows.
    """

    def __init__(
        self, batches: Sequence[TensorDictBase], sizes: dict[str, int], python: Path, worker: Path = WORKER
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        hand_over(batches, sizes, folder)
        self._errors = (folder / "errors.txt").open("w+")
        self._process = subprocess.Popen(
            [str(python), "-P", str(worker), str(folder)],  # -P: the files beside the worker are no modules to it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"},
        )
        try:
            self.loaded = self._answer()
            _check(self.loaded, batches)
        except RuntimeError:
            self.close()
            raise

    def losses(self, batch: int) -> float:
        """The losses of a batch, forward and backward."""
        return self.ask(f"losses {batch}")["loss"]

    def step(self, batch: int) -> float:
        """A training step: the losses, backward, its AdamW, its soft update of the targets."""
        return self.ask(f"step {batch}")["loss"]

    def close(self) -> None:
        """End the process and delete its files."""
        self._process.communicate()  # it ends when its input does
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> AgileRL:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, line: str) -> dict[str, Any]:
        """The worker's answer to a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either, and that is reported
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise Unavailable(f"AgileRL's process ended: {lines[-1] if lines else 'no message'}")


def _check(loaded: dict[str, Any], batches: Sequence[TensorDictBase]) -> None:
    """Raise unless the worker has read as many tokens and decisions, and the same rewards."""
    ours: dict[str, list[float]] = {
        "tokens": [int(batch["attention_mask"].sum()) for batch in batches],
        "decisions": [int(batch["agent_mask"].sum()) for batch in batches],
        "rewards": [float(batch["token_reward"].sum()) for batch in batches],
    }
    for name, expected in ours.items():
        if not np.allclose(loaded[name], expected):
            raise RuntimeError(f"AgileRL's process has read {name} {loaded[name]}, they are {expected}.")
