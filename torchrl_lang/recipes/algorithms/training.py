"""The options that training runs have in common: task, optimizer, device, evaluation, and the model they begin with."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchrl_lang.recipes.options import Options, option, pairs, required
from torchrl_lang.recipes.tasks import OWN_TASK, find_task

if TYPE_CHECKING:
    import torch

    from torchrl_lang.recipes.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Options, group="data"):
    """Options of the recipes that find their task in a dataset or a run."""

    task: str | None = option(
        None,
        "name of a built-in task: datasets and runs record theirs, a file of dialogues needs it for games to evaluate "
        f"on; or {OWN_TASK}: a task or environment factory of your own",
    )
    option: dict[str, Any] = pairs(
        "options of the environment factory of --task, JSON or texts; those of a dataset or run must be the same"
    )

    def given_task(self) -> type[Task] | None:
        """The task that was given, if any; its module is imported.

        Raises:
            ValueError: there is no such task, or only options of one were given.
        """
        if self.task is None and self.option:
            raise ValueError(f"--option {self.option} is for an environment factory: give it as --task {OWN_TASK}.")
        return None if self.task is None else find_task(self.task, self.option)


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions(Options, group="optimisation"):
    """Options of the optimizer."""

    batch_size: int = option(64, "games in a batch", ge=1)
    lr: float = option(2e-3, "peak learning rate of AdamW; Muon's is ten times that", gt=0, le=1)
    warmup: int = option(100, "steps (online: iterations) until the peak, at most a tenth of all", ge=0)
    final_lr: float = option(0.05, "learning rate at the end, as a share of the peak", ge=0, le=1)
    optimizer: Literal["muon", "adamw"] = option("muon", "muon: for matrices, with AdamW for other parameters")
    max_grad_norm: float | None = option(1.0, "gradients are clipped to this norm; none: never", gt=0)
    bf16: bool = option(False, "compute in bfloat16")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """Where a command computes."""

    device: str = option("auto", "cpu, cuda, ...; auto takes a GPU if there is one")

    def torch_device(self) -> torch.device:
        """The device to compute on.

        Raises:
            ValueError: there is no such device here.
        """
        import torch

        from torchrl_lang._files import one_line

        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            torch.zeros(1, device=name).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # the type depends on the device
            raise ValueError(f"--device {self.device} cannot be used ({one_line(error)}): give auto or cpu.") from error
        return torch.device(name)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(OptimisationOptions, DeviceOptions, group="run"):
    """Options of all training runs, whatever they train."""

    place: ClassVar[str]
    """``module:function`` in ``torchrl_lang.recipes`` that trains with the options."""
    evaluates_within: ClassVar[int] = 1000
    """Most steps or iterations between two evaluations where ``eval_every`` is not given."""

    out: Path = required("folder of the run; an existing run is resumed")
    eval_every: int | None = option(
        None,
        "steps (online: iterations) between evaluations, each with a checkpoint, of which the best becomes the model; "
        "none: an eighth of the run, at most 1000 steps (20 iterations)",
        group="evaluation",
        ge=1,
    )
    log_every: int = option(50, "steps (online: iterations) between rows of the log", ge=1)
    logger: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = option(
        (), "where to log beside the files of the run"
    )
    seed: int = option(0, "seed of weights, batches, games and sampling", ge=0)

    def interval(self, length: int) -> int:
        """Steps or iterations between evaluations of a run of this length.

        Examples:
            >>> from pathlib import Path
            >>> from torchrl_lang.recipes.algorithms import BC
            >>> options = BC(data=Path("d"), out=Path("o"))
            >>> [options.interval(steps) for steps in (4, 200, 8000, 50_000)]
            [1, 25, 1000, 1000]
        """
        return self.eval_every or max(1, min(self.evaluates_within, length // 8))

    def check_machine(self) -> None:
        """Raise, before a folder is made, if the device or the package of a logger is missing here."""
        self.torch_device()
        for name in self.logger:
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"--logger {name} needs the package of that name: pip install {name}.")


@dataclass(frozen=True, kw_only=True)
class LoopOptions(TrainingOptions, group="optimisation"):
    """Options of training on stored or drawn data."""

    steps: int = option(8000, "training steps", ge=1)
    weight_decay: float = option(0.01, "AdamW's weight decay", ge=0)
    ema_decay: float = option(
        0.0,
        "decay of an exponential moving average of the weights, which is evaluated and saved; 0: no average",
        ge=0,
        lt=1,
    )


PRETRAINED: Mapping[str, Any] = {
    "optimizer": "adamw",
    "final_lr": 0.1,
    "value_lr": 3e-4,
    "normalize_states": True,
    "clip_heads": True,
    "batch_size": 16,
    "eval_games": 64,
    "eval_every": None,  # that of a task is for longer runs
}
_ADAPTERS_LR = 1e-3
_UNSHARDED = ("archer", "chai")
"""Algorithms that have further models."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingOptions, TaskOptions, group="model"):
    """Options of the training runs of language models.

    Where the model is a pretrained one, from ``pretrained`` or from a ``start`` that is no run from scratch,
    :attr:`of_pretrained` has the values of options that are not given.
    """

    of_pretrained: ClassVar[Mapping[str, Any]] = {}
    """Option values for pretrained models, which count more than those of a task; adapters have their own ``lr``."""

    pretrained: str | None = option(
        None, "pretrained model to begin with: a name of the Hugging Face hub, a folder, or a GGUF file; none: --start"
    )
    start: Path | None = option(
        None,
        "folder of a finished run, a saved agent or a Hugging Face model with the same tokens, whose model to start "
        "from",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "float32",
        "of the language model's weights; value heads and adapters stay in float32, and with --top-layers all but the "
        "blocks below them. auto: bfloat16 on hardware that computes in it, else float32. Weights that train in "
        "bfloat16 lose small updates: train adapters or top layers, or use float32 with --bf16",
    )
    top_layers: int | None = option(
        None, "number of transformer blocks to train, counted from the last; none: all", ge=1
    )
    lora_rank: int | None = option(None, "train LoRA adapters of this rank, not the weights (needs peft)", ge=1)
    lora_layers: int | None = option(None, "adapters on this number of last blocks only; none: on all", ge=1)
    shard: bool = option(
        False, "share the weights of the models out to the processes of torchrun, each of which else has a copy"
    )
    eval_games: int = option(256, "games in an evaluation", group="evaluation", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None and self.pretrained is not None:
            raise ValueError(f"Give one of --start {self.start} and --pretrained {self.pretrained}.")
        if self.lora_rank is not None and self.top_layers is not None:
            raise ValueError(f"Give one of --lora-rank {self.lora_rank} and --top-layers {self.top_layers}.")
        if self.lora_rank is None and self.lora_layers is not None:
            raise ValueError(f"--lora-layers {self.lora_layers} is for adapters: give their --lora-rank, too.")
        if self.lora_rank is not None and self.start is None and self.pretrained is None:
            raise ValueError("--lora-rank trains adapters of a model that exists: give --start or --pretrained.")
        if self.shard and self.optimizer != "adamw":
            raise ValueError("--shard trains with --optimizer adamw: muon needs whole matrices.")
        if self.shard and self.algorithm in _UNSHARDED:
            raise ValueError(f"{self.algorithm} cannot --shard its models: leave it out.")
        if self.dtype == "float16" and self.lora_rank is None and self.top_layers is None:
            remedy = "give --lora-rank or --top-layers, or another dtype"
            raise ValueError(f"Small gradients are 0 in --dtype float16: {remedy}.")

    @classmethod
    def preset_of_model(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """See :meth:`Options.preset_of_model`: :attr:`of_pretrained`, if the model is a pretrained one."""
        if not is_pretrained(given.get("pretrained"), given.get("start")):
            return {}
        names = {field.name for field in dataclasses.fields(cls)} - set(cls.defining)
        adapted = {"lr": _ADAPTERS_LR} if cls.of_pretrained and given.get("lora_rank") is not None else {}
        return {name: value for name, value in {**cls.of_pretrained, **adapted}.items() if name in names}

    @property
    def from_pretrained(self) -> bool:
        """Whether the model is a pretrained one, or that of a run that began with one."""
        return is_pretrained(self.pretrained, self.start)

    def loaded_dtype(self) -> torch.dtype:
        """The dtype in which a model is loaded; of top layers the blocks below them are converted afterwards."""
        import torch

        return torch.float32 if self.top_layers is not None else self.torch_dtype()

    def torch_dtype(self) -> torch.dtype:
        """The dtype of the language model's weights on the device."""
        import torch

        return fast_dtype(self.torch_device()) if self.dtype == "auto" else getattr(torch, self.dtype)


def fast_dtype(device: torch.device) -> torch.dtype:
    """The dtype bfloat16 where a device computes in it, else float32."""
    import torch

    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Options, group="model"):
    """Options of new value heads."""

    normalize_states: bool = option(
        False, "value heads scale and clip the states that they read, and begin with values of zero"
    )
    clip_heads: bool = option(
        False, "clip the gradients of value heads apart from the others, so that they do not scale those down"
    )


def is_pretrained(pretrained: str | None, start: Path | None) -> bool:
    """Whether a run begins with a pretrained model: a Hugging Face model, or the model of a run that began with one."""
    if pretrained is not None or start is None:
        return pretrained is not None
    return holds_model(start) or bool(_record_in(start).get("from_pretrained"))


def holds_model(folder: Path) -> bool:
    """Whether a folder is that of a Hugging Face model, such as a saved agent, rather than that of a run."""
    return "model_type" in _record_in(folder)


def _record_in(folder: Path) -> Mapping[str, Any]:
    from torchrl_lang._files import read_json

    path = folder / "config.json"
    return read_json(path, remedy="restore the file, or start from another folder") if path.is_file() else {}
