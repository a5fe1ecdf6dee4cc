"""The algorithms of ``train``: their options and where each is run. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torchrl_lang.recipes.options import Options, dashed, option, pairs, required, with_defaults
from torchrl_lang.recipes.tasks import OWN_TASK, find_task

if TYPE_CHECKING:
    import torch

    from torchrl_lang.recipes.tasks.base import Task

BETAS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Weights of the values that :meth:`FinishedRun.choose_beta` tries."""

O = TypeVar("O", bound=Options)  # noqa: E741


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


_PRETRAINED: Mapping[str, Any] = {
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
_UNSHARDED = ("kto", "archer", "chai")
"""Algorithms whose number of passes depends on the rows of a process, or that have further models."""


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
        "of the language model's weights; value heads and adapters stay in float32. auto: bfloat16 on hardware that "
        "computes in it, else float32. Weights that train in bfloat16 lose small updates: train adapters, or use "
        "float32 with --bf16. float16 is for adapters alone",
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
        if self.dtype == "float16" and self.lora_rank is None:
            raise ValueError("Small gradients are 0 in --dtype float16: give --lora-rank, or another dtype.")

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

    def torch_dtype(self) -> torch.dtype:
        """The dtype of the language model's weights on the device."""
        import torch

        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        if self.torch_device().type == "cuda":
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32


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


# -- offline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DialogueOptions(Options, group="data"):
    """Options for --data FILE.jsonl, in the order of :func:`~torchrl_lang.data.dataset_from_jsonl`."""

    tokenizer: str | None = option(
        None, "of dialogues: name or folder of a Hugging Face tokenizer; none: the characters of the file"
    )
    chat: bool = option(False, "write dialogues as the chat template of --tokenizer does")
    system: str | None = option(None, "system prompt of the chat template; implies --chat")
    history: Literal["exact", "kept"] = option(
        "exact",
        "of chat templates that change earlier messages: exact: a row for each utterance; kept: rows keep the messages",
    )
    row_length: int | None = option(
        None, "tokens of a row of dialogues; none: those of the longest dialogue, or of the environment", ge=1
    )
    on_error: Literal["raise", "skip"] = option("raise", "skip: leave out lines that hold no valid dialogue")
    on_overflow: Literal["error", "truncate"] = option("error", "truncate: cut dialogues longer than --row-length")
    ignore: tuple[str, ...] = option((), "keys to ignore in the lines of dialogues")
    reward: str = option("reward", "key of the lines of dialogues that holds their reward")

    def given_of_dialogues(self) -> list[str]:
        """The names of these options that were given, as the command line writes them."""
        fields = dataclasses.fields(DialogueOptions)
        return [f"--{dashed(field.name)}" for field in fields if getattr(self, field.name) != field.default]


@dataclass(frozen=True, kw_only=True)
class SizeOptions(Options, group="model"):
    """Sizes of a model from scratch."""

    layers: int = option(3, "transformer blocks of a model from scratch", ge=1)
    width: int = option(64, "hidden size of a model from scratch", ge=1)
    heads: int = option(4, "attention heads of a model from scratch", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"--width must be a multiple of --heads {self.heads}, got {self.width}.")

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name."""
        return {name: getattr(self, name) for name in ("layers", "width", "heads")}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SizeOptions):
    """Options of a new model that offline training begins with, and of its computation."""

    kind: str = option("gpt2", "Hugging Face model type of a model from scratch")
    features_hidden: int = option(
        0, "width of a hidden layer of a new projector of the rows' features; 0: a linear one", ge=0
    )
    feature_positions: bool = option(True, "let features take positions of the model, in front of the tokens")
    length_groups: int | None = option(
        None, "groups of similar length that a batch is split into to reduce padding; none: automatic", ge=1
    )
    compile: bool = option(False, "compile the model (needs a C++ compiler; slow to start; pays on GPUs)")
    checkpointing: bool = option(False, "recompute activations in the backward pass: slower, much less memory")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions(
    DialogueOptions,
    ModelOptions,
    LoopOptions,
    RunOptions,
    group="data",
    task_from=("data", "manifest.json"),
    of_pretrained={**_PRETRAINED, "lr": 5e-5, "steps": 200, "log_every": 5, "held_out": 64, "transition_weight": 0.0},
):
    """Options of all offline recipes."""

    data: Path = required("folder of a dataset, see `generate`, or a JSONL file of dialogues")
    fraction: float = option(1.0, "share of episodes to learn from, those with the best return", gt=0, le=1)
    bottom_fraction: float = option(
        1.0, "share of episodes that --fraction chooses from, those with the worst return", gt=0, le=1
    )
    held_out: int = option(
        500, "last episodes of the dataset, at most a tenth, that are not trained on but check what was learned", ge=0
    )
    transition_weight: float = option(1.0, "weight of environment tokens in the policy's loss", group="loss", ge=0)


@dataclass(frozen=True, kw_only=True)
class BC(OfflineOptions, algorithm="bc", preset="bc", place="imitation:train_bc"):
    """Behaviour cloning on a dataset, or with --fraction below 1 on its best episodes."""


@dataclass(frozen=True, kw_only=True)
class DT(OfflineOptions, group="loss", algorithm="dt", preset="bc", place="imitation:train_dt"):
    """Decision transformer on a dataset (arXiv 2106.01345), which imitates given the return."""

    mode: Literal["constant", "decremented"] = option(
        "constant", "condition on the return of the whole episode, or at each turn on the return to go"
    )
    target_return: float | Literal["best"] = option(
        "best", "return that the policy is asked for at play; best: mean return of the best tenth of the episodes"
    )


@dataclass(frozen=True, kw_only=True)
class HeadOptions(Options, group="model"):
    """Options of new value heads."""

    normalize_states: bool = option(
        False, "value heads scale and clip the states that they read, and begin with values of zero"
    )
    clip_heads: bool = option(
        False, "clip the gradients of value heads apart from the others, so that they do not scale those down"
    )


@dataclass(frozen=True, kw_only=True)
class ValueOptions(HeadOptions, OfflineOptions, group="loss", preset="ilql"):
    """Base of the options of the recipes that learn values."""

    value_lr: float | None = option(
        None, "peak learning rate of value heads; none: --lr", group="optimisation", gt=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class DiscountOptions(ValueOptions):
    """Options of the recipes with a target network that follows the values of tokens."""

    gamma: float = option(1.0, "discount factor per token inside an utterance", ge=0, le=1)
    turn_gamma: float = option(0.99, "discount factor from an utterance to the next", ge=0, le=1)
    tau: float = option(0.02, "soft update rate of the target", gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class ActionValueOptions(DiscountOptions):
    """Options of the recipes with values of tokens."""

    qvalue_weight: float = option(0.5, "weight of Q's loss; the policy's has weight 1", ge=0)


@dataclass(frozen=True, kw_only=True)
class ILQL(ActionValueOptions, algorithm="ilql", place="token_values:train_ilql"):
    """Implicit language Q-learning on a dataset (arXiv 2206.11871).

    The defaults are the settings to begin with; those of the paper's code for Wordle are paper-ilql's.
    """

    beta: float = option(4.0, "weight of the values in the policy that is evaluated during training", ge=0)
    expectile: float = option(0.8, "expectile of Q that V regresses on; 0.5: the mean", gt=0, lt=1)
    value_weight: float = option(0.5, "weight of V's loss; the policy's has weight 1", ge=0)
    guidance_clip: float | None = option(
        None, "upper bound of beta * (Q - V) in decoding; 0: values only make tokens less likely; none: no bound", ge=0
    )
    advantage_temperature: float = option(
        0.0, "beta of the weights exp(beta * (Q - V)) of the policy's loss; 0: behaviour cloning", ge=0
    )
    weight_clip: float | None = option(None, "upper bound of these weights; none: no bound", gt=0)
    actor_normalizer: Literal["all", "action"] = option(
        "action", "what the policy's loss is divided by: the number of the agent's tokens (action) or of all real ones"
    )
    cql_weight: float = option(0.01, "weight of the CQL term", ge=0)
    target: Literal["td", "mc", "lambda"] = option(
        "lambda", "what V regresses on: td (target Q), mc (rewards to go) or lambda-returns"
    )
    lmbda: float = option(1.0, "lambda of the lambda-returns inside an utterance", ge=0, le=1)
    turn_lmbda: float = option(0.0, "lambda of the lambda-returns at its end", ge=0, le=1)
    qvalue_lmbda: float = option(0.0, "lambda of Q's TD(lambda) targets; 0: one step", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class CQL(ActionValueOptions, algorithm="cql", place="token_values:train_cql"):
    """Conservative Q-learning on a dataset (arXiv 2006.04779)."""

    beta: float = option(4.0, "weight of the values in the policy that is evaluated during training", ge=0)
    cql_weight: float = option(0.1, "weight of the CQL term, the paper's alpha", ge=0)


@dataclass(frozen=True, kw_only=True)
class BCQ(ActionValueOptions, algorithm="bcq", place="token_values:train_bcq"):
    """Discrete batch-constrained Q-learning on a dataset (arXiv 1910.01708)."""

    threshold: float = option(
        0.3, "least probability of a token relative to the likeliest one's, the paper's tau", ge=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class Psi(ActionValueOptions, algorithm="psi", place="token_values:train_psi"):
    """Psi-learning (KL control) on a dataset (arXiv 1611.02796)."""

    prior: Path | None = option(
        None, "folder of a finished run with the same tokens whose policy is the prior; none: the policy, as it learns"
    )
    reward_scale: float = option(1.0, "reward that is worth one nat of divergence from the prior", gt=0)
    threshold: float = option(
        0.05,
        "least probability of a token relative to the likeliest one's; 0: as in the papers, which suits data that take "
        "every token at every state",
        ge=0,
        le=1,
    )


# All values begin at the greatest return, and what is less has to travel back through the target: a fast one.
@with_defaults(tau=0.2)
class QSFT(DiscountOptions, algorithm="qsft", defining=("beta", "tau"), place="token_values:train_qsft"):
    """Q-SFT on a dataset (arXiv 2411.05193): Q-learning by weighted fine-tuning, without heads; needs --start."""

    beta: float = option(64.0, "weight of the values in the policy that is evaluated during training", ge=0)
    guide: Literal["ratio", "likelihood"] = option(
        "likelihood",
        "what guides the policy: the likelihood p, as in the paper, or the value, which is the ratio p / pi",
    )
    rest: Literal["padding", "all"] = option(
        "padding", "tokens that get the probability that is left: padding, which the agent never writes, or all alike"
    )
    threshold: float = option(
        0.3,
        "least probability of a token relative to the likeliest one's, in the backup and where the ratio guides; 0: as "
        "in the paper",
        ge=0,
        le=1,
    )
    value_min: float | None = option(None, "return to go that is the value 0; none: the data's least")
    value_max: float | None = option(None, "return to go that is the value 1; none: the data's greatest")


@dataclass(frozen=True, kw_only=True)
class OREO(ValueOptions, algorithm="oreo", defining=("value_weight",), place="token_values:train_oreo"):
    """OREO on a dataset (arXiv 2412.16145): path consistency of a policy and its values; needs --start."""

    reward_scale: float = option(
        0.1, "reward that is worth one nat of divergence from the reference, the paper's beta", gt=0
    )
    kl_weight: float = option(
        0.3,
        "weight of the divergence from the reference, the paper's alpha (0.01 there): keeps tokens without data rare",
        ge=0,
    )
    value_weight: float = option(1.0, "weight of V's loss; the policy's has weight 1", ge=0)
    level: Literal["token", "utterance", "row"] = option(
        "token", "what an action is: a token, an utterance, or all of a row"
    )


# Few small steps: the losses still fall when the returns of the policy have long begun to fall as well.
@with_defaults(transition_weight=0.0, optimizer="adamw", lr=1e-4, steps=300)
class PreferenceOptions(OfflineOptions, group="loss", preset="bc", defining=("transition_weight",)):
    """Base of the options of the recipes that learn which episodes are better; they need --start."""

    reward_scale: float = option(
        0.5,
        "reward that is worth one nat of divergence from the start, the papers' beta (IPO: tau; 0.1 is usual for texts "
        "that a model answers with)",
        gt=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transition_weight:
            raise ValueError(f"{self.algorithm} learns nothing from the environment's tokens: no --transition-weight.")


@dataclass(frozen=True, kw_only=True)
class PairOptions(PreferenceOptions):
    """Options of the recipes that learn from pairs of episodes that begin alike, a better and a worse one."""

    pairs: int | None = option(
        None,
        "pairs of episodes that begin alike (of one group, where the data have groups): the best with the worst, the "
        "second best with the second worst, ...; none: as many as there are",
        ge=1,
    )
    per_token: bool = option(False, "compare the means over the agent's tokens of an episode, not the sums")


@dataclass(frozen=True, kw_only=True)
class DPO(PairOptions, algorithm="dpo", place="preference:train_dpo"):
    """Direct preference optimisation on a dataset (arXiv 2305.18290): better episodes likelier than worse ones."""

    label_smoothing: float = option(
        0.2,
        "probability that the worse episode of a pair is the better one, by luck (conservative DPO); 0: plain DPO",
        ge=0,
        lt=0.5,
    )


@with_defaults(reward_scale=0.3)
class IPO(PairOptions, algorithm="ipo", place="preference:train_ipo"):
    """Identity preference optimisation on a dataset (arXiv 2310.12036): better episodes likelier by a fixed margin."""


@with_defaults(reward_scale=1.0)
class KTO(PreferenceOptions, algorithm="kto", place="preference:train_kto"):
    """Kahneman-Tversky optimisation on a dataset (arXiv 2402.01306): episodes are desirable or not."""

    threshold: float | None = option(None, "return above which an episode is desirable; none: the data's mean return")
    desirable_weight: float = option(1.0, "weight of desirable episodes", ge=0)
    undesirable_weight: float = option(1.0, "weight of the others", ge=0)
    baseline: Literal["mismatched", "rows"] = option(
        "mismatched",
        "episodes whose likelihood estimates the divergence from the start: beginnings with the rests of others, as in "
        "the paper, or those of the batch as they are (two passes less; the same where all begin alike)",
    )


@dataclass(frozen=True, kw_only=True)
class UtteranceOptions(ValueOptions):
    """Options of the recipes whose policy ranks sampled utterances by their values."""

    gamma: float = option(0.99, "discount factor from an utterance to the next", ge=0, le=1)
    tau: float = option(0.02, "soft update rate of the target Q", gt=0, le=1)
    candidates: int = option(8, "utterances that the policy samples to play the best one", ge=1)


@with_defaults(optimizer="adamw")  # the heads have no linear layer for Muon
class CHAI(UtteranceOptions, algorithm="chai", place="utterance_values:train_chai"):
    """CHAI (arXiv 2204.08426): values of utterances of a language model that stays as it is; needs --start."""

    cql_weight: float = option(0.1, "weight of the CQL term over the proposed utterances", ge=0)
    proposals: int = option(5, "utterances that are sampled in each state of the dataset", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("--top-layers", self.top_layers), ("--lora-rank", self.lora_rank)):
            if value is not None:
                raise ValueError(f"chai trains no block of the language model: leave out {name} {value}.")


@dataclass(frozen=True, kw_only=True)
class UtteranceILQL(UtteranceOptions, algorithm="utterance-ilql", place="utterance_values:train_utterance_ilql"):
    """Implicit Q-learning with one value for each utterance (arXiv 2206.11871), on a dataset."""

    expectile: float = option(0.8, "expectile of Q that V regresses on; 0.5: the mean", gt=0, lt=1)
    value_weight: float = option(0.5, "weight of V's loss; the policy's has weight 1", ge=0)
    qvalue_weight: float = option(0.5, "weight of Q's loss", ge=0)
    log_prob_weight: float = option(0.0, "weight of a candidate's log-probability beside its value", ge=0)


@with_defaults(fraction=0.1)
class PercentBC(BC, algorithm="percent-bc", defining=("fraction",)):
    """Behaviour cloning on the best tenth of the episodes (%BC)."""


@with_defaults(expectile=0.5)
class SingleStep(ILQL, algorithm="single-step", defining=("expectile",)):
    """Single-step RL: values of the policy that made the data (SARSA), which is ILQL with the mean of Q as V.

    All else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(expectile=0.5, target="mc", qvalue_lmbda=1.0)
class MonteCarlo(ILQL, algorithm="monte-carlo", defining=("expectile", "target", "qvalue_lmbda")):
    """Monte-Carlo returns: Q and V regress on the rewards to go instead of on learned values.

    Q of a truncated episode bootstraps from V of its last state; V takes the rewards that the episode holds. All
    else is as in ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(beta=0.0, advantage_temperature=4.0, weight_clip=20.0)
class AWAC(ILQL, algorithm="awac", defining=("beta", "advantage_temperature", "weight_clip")):
    """Advantage-weighted actor-critic (arXiv 2006.09359): values weigh the policy's loss, and do not guide decoding.

    The values are those of ilql, its CQL term included: --cql-weight 0 leaves it out.
    """


@with_defaults(
    optimizer="adamw",
    lr=1e-5,
    warmup=0,
    final_lr=1.0,
    weight_decay=0.0,
    max_grad_norm=None,
    batch_size=1024,
    layers=12,
    width=768,
    heads=12,
    gamma=0.99,
    expectile=0.7,
    value_weight=1.0,
    qvalue_weight=1.0,
    cql_weight=1e-4,
    target="td",
    tau=0.005,
    transition_weight=0.0,
    actor_normalizer="all",
    beta=16.0,
    guidance_clip=0.0,
)
class PaperILQL(ILQL, algorithm="paper-ilql", preset="", of_pretrained={}):
    """ILQL with the paper's settings for Wordle (arXiv 2206.11871): GPT-2's size, small steps; meant for a GPU.

    The settings are those of the paper's code. Unlike there, policy, values and target values share one trunk in place
    of three, models from scratch have no dropout, and the checkpoint is chosen by its games rather than its loss.
    """


# -- online ---------------------------------------------------------------------------------------------------------


_PRETRAINED_ONLINE = {**_PRETRAINED, "lr": 2e-5, "games": 64, "iterations": 40, "kl_coef": 0.05}
_PRETRAINED_ONLINE |= {"value_warmup": 5, "value_lr": 1e-4}  # returns of so few games are noisy: a small rate


@with_defaults(lr=3e-4, warmup=10, final_lr=0.1, optimizer="adamw", eval_games=512, log_every=1)
class OnlineOptions(
    RunOptions,
    group="optimisation",
    task_from=("start", "config.json"),
    evaluates_within=20,
    of_pretrained={**_PRETRAINED_ONLINE, "kl_horizon": 250},
):
    """Options of all recipes that learn from games of the current policy.

    The initial policy, that of ``start`` or ``pretrained``, is also the reference of the KL penalty. A run brings its
    task, other models need ``task``.
    """

    iterations: int = option(200, "training iterations, each with new games", ge=1)
    games: int = option(256, "games played in parallel", ge=1)
    turns: int = option(6, "turns of each of them in an iteration", ge=1)
    collector: Literal["single", "sync", "async", "ray"] = option(
        "single",
        "single: games in this process; sync, async: in worker processes, with async also while it trains; ray: as "
        "async, on the nodes of a Ray cluster",
    )
    workers: int = option(2, "number of worker processes", ge=1)
    ray_address: str | None = option(
        None, "HOST:PORT of the Ray cluster, or auto; none: $RAY_ADDRESS, or a new one on this machine"
    )
    ray_gpus: float = option(0.0, "GPUs of each Ray worker, such as 0.5; 0: they play on the CPU", ge=0)
    max_staleness: int | None = option(
        None, "drop games with tokens sampled more than this number of weight updates ago", ge=0
    )
    examples: float = option(
        0.0, "probability that a turn is played by a random player and excluded from the loss", ge=0, lt=1
    )
    epochs: int = option(2, "epochs over the games of an iteration", ge=1)
    accumulate: int = option(1, "batches per optimizer step, at most all of an iteration", ge=1)
    kl_coef: float = option(0.2, "initial KL coefficient; 0 needs --kl-target none", ge=0)
    kl_target: float | None = option(4.0, "target KL, in nats per game; none keeps the coefficient constant", gt=0)
    kl_horizon: int = option(1000, "games in which the coefficient changes by at most a fifth", ge=1)
    temperature: float = option(1.0, "temperature of the policy, in games and in the loss", gt=0)
    curriculum: int | None = option(
        None,
        "number of starts to draw games from, more often those whose returns vary most, for tasks whose starts can be "
        "given; none: all starts alike",
        ge=2,
    )
    engine: Literal["transformers", "vllm"] | None = option(
        None, "inference engine that plays the games with the trainer's weights; none: the trainer's model plays itself"
    )
    engine_option: dict[str, Any] = pairs(
        "options of --engine, JSON or texts, such as dtype=bfloat16; of vllm those of its LLM, such as "
        "gpu_memory_utilization=0.5 (default 0.4)"
    )
    record_history: Path | None = option(
        None, "folder to record the games of each iteration in, as run-NAME by the name of --out; none: not recorded"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collector != "single" and self.games % self.workers:
            raise ValueError(f"--games {self.games} cannot be shared out to {self.workers} workers: give a multiple.")
        if self.collector != "single" and self.curriculum is not None:
            raise ValueError(f"--curriculum draws games in this process: leave out --collector {self.collector}.")
        self._check_engine()
        weight = getattr(self, "kl_weight", None)  # of some recipes; the target is that of either
        if self.kl_target is not None and not (self.kl_coef or weight):
            other = "" if weight is None else ", or a --kl-weight"
            raise ValueError(f"--kl-coef 0 needs --kl-target none{other}: no coefficient can be moved to a target.")
        if self.start is None and self.pretrained is None:
            begins = f"{self.algorithm} begins with a policy: give --start FOLDER, of a finished run or a model"
            raise ValueError(f"{begins}, or --pretrained NAME.")

    def _check_engine(self) -> None:
        """Raise ValueError for options that an engine does not go together with."""
        if self.engine is None:
            given = [name for name in ("engine_option", "max_engine_weight") if getattr(self, name, None)]
            if given:
                raise ValueError(f"--{dashed(given[0])} is about an inference engine: give its --engine, too.")
        elif self.collector != "single":
            raise ValueError(f"--engine plays in this process: leave out --collector {self.collector}.")
        elif self.lora_rank is not None:
            raise ValueError(f"--engine has whole weights, no adapters: leave out --lora-rank {self.lora_rank}.")

    def check_machine(self) -> None:
        """See :meth:`TrainingOptions.check_machine`."""
        super().check_machine()
        if self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ImportError("--engine vllm needs an extra: pip install 'torchrl-lang[vllm]'.")
        if self.collector == "ray" and importlib.util.find_spec("ray") is None:
            raise ImportError("--collector ray needs an extra: pip install 'torchrl-lang[ray]'.")

    @property
    def source(self) -> Path:
        """Where the initial policy comes from, a folder or a name."""
        return self.start or Path(str(self.pretrained))


@dataclass(frozen=True, kw_only=True)
class RatioOptions(OnlineOptions, group="loss"):
    """Options of the recipes whose policy loss has a ratio of probabilities.

    The KL penalty is in the rewards (``kl_coef``) or in the loss (``kl_weight``), with the same target and horizon.
    """

    clip_epsilon: float = option(0.2, "clipping range of the probability ratio", gt=0)
    clip_high: float | None = option(None, "its range above 1; none: that of --clip-epsilon", gt=0)
    ratio: Literal["token", "turn", "row"] = option("token", "whose probability ratio: of a token, a turn or a game")
    normalize_ratio: bool = option(True, "the ratio of a turn or game is the geometric mean of its tokens' ratios")
    surrogate: Literal["ppo", "cispo"] = option("ppo", "cispo: clipped tokens keep their gradient")
    aggregation: Literal["token_mean", "turn_mean", "prompt_mean", "constant"] | None = option(
        None,
        "mean over all tokens, or over turns or games of the means over their tokens; constant: the sum over a game "
        "divided by the tokens that --turns utterances may have, which only sets the scale (longer games exceed it); "
        "none: as --ratio",
    )
    entropy_weight: float = option(0.0, "weight of the policy's entropy", ge=0)
    kl_weight: float = option(0.0, "initial weight of the KL in the loss, instead of --kl-coef in the rewards", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = option("k3", "its estimator in the loss")
    max_engine_weight: float | None = option(
        None,
        "weigh the terms of tokens by the trainer's probability over that of --engine, at most this number (truncated "
        "importance sampling), such as 2; none: no weights",
        gt=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_coef and self.kl_weight:
            given = f"--kl-coef {self.kl_coef} and --kl-weight {self.kl_weight}"
            raise ValueError(f"The KL penalty is in the rewards or in the loss, got {given}: set one of them to 0.")


@dataclass(frozen=True, kw_only=True)
class PPO(HeadOptions, RatioOptions, group="loss", algorithm="ppo", place="online_algorithms:train_ppo"):
    """Proximal policy optimization (arXiv 1707.06347) from a finished run, with a KL penalty to it."""

    turn_values: bool = option(False, "one value and one advantage for each turn, instead of each token")
    value_lr: float = option(3e-3, "peak learning rate of the value head", gt=0, le=1)
    value_weight: float = option(0.5, "weight of the value loss", ge=0)
    gamma: float = option(1.0, "discount factor between tokens of an utterance", ge=0, le=1)
    lmbda: float = option(0.95, "lambda of the advantage estimate inside an utterance", ge=0, le=1)
    turn_gamma: float = option(0.99, "discount factor between turns", ge=0, le=1)
    turn_lmbda: float = option(0.95, "lambda of the advantage estimate across turns", ge=0, le=1)
    detach_value: bool = option(True, "stop value gradients at the trunk")
    value_warmup: int = option(
        10, "iterations at the beginning in which only the value head is trained, at most a third of all", ge=0
    )


@with_defaults(turn_values=True, ratio="turn", normalize_ratio=False)
class TurnPPO(PPO, algorithm="turn-ppo", preset="ppo", defining=("turn_values", "ratio", "normalize_ratio")):
    """PPO with one value, advantage and ratio for each turn (arXiv 2512.17008)."""


_KL = ("kl_coef", "kl_weight", "kl_target")
_NO_KL: dict[str, Any] = {"kl_coef": 0.0, "kl_weight": 0.0, "kl_target": None}
_KL_IN_REWARDS: dict[str, Any] = {"kl_coef": 0.2, "kl_weight": 0.0, "kl_target": 4.0}


@with_defaults(aggregation="prompt_mean", kl_coef=0.0, kl_weight=0.04, kl_target=None)
class GRPO(
    RatioOptions,
    algorithm="grpo",
    preset="ppo",
    defining=(*_KL, "aggregation"),
    place="online_algorithms:train_without_critic",
):
    """Group-relative policy optimization (arXiv 2402.03300): games of the same start are compared, without a critic."""

    advantage: Literal["grpo", "dr-grpo", "rloo", "gigpo", "batch", "reinforce++"] = option(
        "grpo", "how the returns of games become advantages"
    )
    group_size: int = option(8, "games with the same start", group="optimisation", ge=1)
    drop_equal: bool = option(False, "leave out groups of equal returns, and play again for others (--draw-limit)")
    draw_limit: int = option(
        4,
        "with --drop-equal, how often games are played in an iteration until --games differ",
        group="optimisation",
        ge=1,
    )
    turn_gamma: float = option(
        1.0, "discount factor of turns in the returns; of gigpo only in those from a turn on", ge=0, le=1
    )
    anchor: Literal["prefix", "observation"] = option(
        "prefix", "of gigpo: turns begin alike after the same tokens, or after the same text of the environment"
    )
    state_weight: float = option(1.0, "of gigpo: weight of the advantages of turns that begin alike", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        workers = 1 if self.collector == "single" else self.workers
        if self.games % (workers * self.group_size):
            whole = f"{workers} workers with groups of {self.group_size}" if workers > 1 else f"{self.group_size}"
            raise ValueError(f"--games {self.games} is no multiple of --group-size, {whole}: groups are whole.")
        if self.group_size == 1 and (self.drop_equal or self.advantage not in ("batch", "reinforce++")):
            raise ValueError(f"{self.algorithm} compares games of the same start: give a --group-size of at least 2.")
        if self.max_staleness is not None and self.group_size > 1:
            raise ValueError("--max-staleness drops single games, and groups are whole: leave it out.")


@with_defaults(**_NO_KL, advantage="dr-grpo", aggregation="constant")
class DrGRPO(GRPO, algorithm="dr-grpo", defining=(*_KL, "advantage", "aggregation")):
    """GRPO without its two biases (arXiv 2503.20783): advantages are not scaled, sums are divided by a constant."""


# One step an iteration, so that the games are those of the policy that learns.
@with_defaults(
    **_KL_IN_REWARDS, advantage="rloo", ratio="row", normalize_ratio=False, aggregation=None, epochs=1, accumulate=9999
)
class RLOO(
    GRPO,
    algorithm="rloo",
    defining=(*_KL, "advantage", "ratio", "normalize_ratio", "aggregation", "epochs", "accumulate"),
):
    """REINFORCE with the mean of the group's other games as baseline (arXiv 2402.14740), one step an iteration."""


@with_defaults(**_KL_IN_REWARDS, advantage="reinforce++", aggregation=None, group_size=1)
class ReinforcePlusPlus(GRPO, algorithm="reinforce++", defining=(*_KL, "advantage", "aggregation", "group_size")):
    """REINFORCE with returns to go standardized over all tokens, without groups (arXiv 2501.03262)."""


@with_defaults(**_NO_KL, aggregation=None, clip_high=0.28, drop_equal=True)
class DAPO(GRPO, algorithm="dapo", defining=(*_KL, "aggregation", "clip_high", "drop_equal")):
    """GRPO that clips higher above 1 and plays again for groups that differ (arXiv 2503.14476)."""


@with_defaults(**_NO_KL, aggregation=None, ratio="row", clip_epsilon=3e-4, clip_high=4e-4)
class GSPO(GRPO, algorithm="gspo", defining=(*_KL, "aggregation", "ratio", "clip_epsilon", "clip_high")):
    """GRPO with the ratio of whole games, the geometric mean of their tokens' ratios (arXiv 2507.18071)."""


@with_defaults(**_NO_KL, aggregation=None, surrogate="cispo", clip_epsilon=1.0, clip_high=0.28)
class CISPO(GRPO, algorithm="cispo", defining=(*_KL, "aggregation", "surrogate", "clip_epsilon", "clip_high")):
    """GRPO that clips the weight of the log-probabilities, so that all tokens keep a gradient (arXiv 2506.13585)."""


@with_defaults(advantage="gigpo", kl_weight=0.01)
class GiGPO(GRPO, algorithm="gigpo", defining=(*_KL, "advantage", "aggregation")):
    """GRPO that compares turns of a group that begin in the same state as well (arXiv 2505.10978)."""


# Selection needs many games at a time; the selected ones can be used for several epochs, because of the KL penalty.
@with_defaults(iterations=40, games=2048, epochs=4, lr=1e-3, kl_coef=0.1, kl_target=6.0, kl_horizon=4000)
class Rejection(
    OnlineOptions,
    group="loss",
    algorithm="rejection",
    place="online_algorithms:train_rejection",
    of_pretrained={**_PRETRAINED_ONLINE, "games": 256, "iterations": 20, "epochs": 2, "kl_horizon": 1000},
):
    """Rejection sampling or expert iteration: imitate the best games of the policy, with a KL penalty."""

    fraction: float = option(0.2, "share of the games of an iteration to imitate", gt=0, le=1)
    best_so_far: int | None = option(None, "number of the best games of all iterations to imitate instead", ge=1)
    turn_gamma: float = option(1.0, "discount factor of turns in the ranking", ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1:
            raise ValueError(f"The BC loss is at --temperature 1, so games must be as well: got {self.temperature}.")


# Each game is learned from many times, so few of them are played in an iteration.
@with_defaults(games=16, epochs=1)
class ArCHer(HeadOptions, OnlineOptions, group="loss", algorithm="archer", place="archer:train_archer"):
    """ArCHer (arXiv 2402.19446): a critic of utterances learns from old games too, and the policy from the critic."""

    gamma: float = option(0.99, "discount factor from an utterance to the next", ge=0, le=1)
    replay: int = option(4096, "number of the latest games that are kept to learn from", ge=1)
    states: Literal["replay", "new"] = option(
        "replay",
        "where the policy draws the utterances that it learns from: in states of all games kept, or of the new ones",
    )
    draws: int = option(
        512, "utterances that the policy draws in an iteration to learn from, and as many for the critic", ge=1
    )
    value_steps: int = option(
        100, "training steps of the critic in an iteration, each on a batch of games kept", group="optimisation", ge=1
    )
    value_lr: float = option(1e-3, "peak learning rate of the critic", group="optimisation", gt=0, le=1)
    value_warmup: int = option(
        5, "iterations at the beginning in which only the critic is trained, at most a third of all", ge=0
    )
    tau: float = option(0.05, "soft update rate of the critic's target", gt=0, le=1)
    clip_epsilon: float = option(0.2, "clipping range of the probability ratio", gt=0)
    entropy_weight: float = option(0.0, "weight of the policy's entropy", ge=0)
    normalize_advantage: bool = option(False, "standardise the advantages of each batch")


# -- finished runs ---------------------------------------------------------------------------------------------------


@with_defaults(device="cpu")
class Evaluate(TaskOptions, DeviceOptions, group="evaluation", preset="evaluate", task_from=("run", "config.json")):
    """Evaluate a finished run on its task, beside the task's scripted players."""

    run: Path = required("folder of a finished run")
    also: tuple[Path, ...] = option((), "further runs on the same games, such as the initial policy of this one")
    games: int | None = option(
        None, "number of games; none: 1000, or a split's games once (five times where actions are sampled)", ge=1
    )
    split: str | None = option(None, "games of which split; none: the task's own choice")
    beta: tuple[float | Literal["auto"], ...] = option(
        (0.0, 2.0, 4.0),
        "weights of the values, for runs that have values; auto: the best of 1, 2, 4, 8 and 16 on 250 other games. "
        "Runs of bcq and psi play by their values alone, with weight 1",
        ge=0,
    )
    method: Literal["sample", "greedy", "beam", "best_of"] | None = option(
        None, "decoding method; none: greedy, and without values sampling as well"
    )
    candidates: int = option(8, "samples for each utterance of best_of, which plays the one of highest value", ge=1)
    seed: int = option(2_000_000, "seed of games and sampling; training evaluates on games of its seed + 1", ge=0)
    plots: bool = option(False, "draw a histogram of the turns needed (needs matplotlib)")


@dataclass(frozen=True, kw_only=True)
class ConvertAgileRL(TaskOptions, group="data", task_from=("data", "manifest.json")):
    """Make a finished run of an agent that AgileRL's ILQL trained."""

    source: Path = required("folder of the agent, written by torchrl_lang/modules/agilerl/export.py beside AgileRL")
    data: Path = required("folder of a dataset of the agent's task, with the agent's tokens, see `generate`")
    out: Path = required("folder of the run, which does not exist yet")


_OF_TOKENS = (ILQL, SingleStep, MonteCarlo, AWAC, PaperILQL, CQL, Psi, BCQ, QSFT, OREO)
_OTHERS = (DPO, IPO, KTO, CHAI, UtteranceILQL, PPO, Rejection, ArCHer)
_RATIOS = (TurnPPO, GRPO, DrGRPO, RLOO, ReinforcePlusPlus, DAPO, GSPO, CISPO, GiGPO)
ALGORITHMS: dict[str, type[TrainingOptions]] = {
    kind.algorithm: kind for kind in (BC, PercentBC, DT, *_OF_TOKENS, *_OTHERS, *_RATIOS)
}
"""The algorithms of ``train`` by name."""


def together(options: Options) -> AbstractContextManager[None]:
    """Where ``torchrun`` has started this process, a context in which it trains together with the others.

    Raises:
        ValueError: the options are of a command that works alone, or the batches are too small to be shared out.
    """
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    if alone and isinstance(options, RunOptions) and options.shard:
        raise ValueError("--shard shares weights out to the processes of torchrun: start the command with torchrun.")
    if alone or "RANK" not in os.environ:
        return nullcontext()
    from torchrl_lang import _ranks  # it imports torch

    number = os.environ["WORLD_SIZE"]
    if not isinstance(options, RunOptions):
        raise ValueError(f"Only the training of language models runs in {number} processes: leave out torchrun.")
    if options.batch_size < int(number):
        raise ValueError(f"--batch-size {options.batch_size} is fewer than one for each of {number} processes.")
    if getattr(options, "collector", None) == "ray":
        raise ValueError("--collector ray plays for one learner: leave it out, or torchrun.")
    _ranks.choose_gpu()
    return _ranks.joined(options.torch_device())


def train(options: TrainingOptions, **opened: Any) -> float:
    """Train with the options of an algorithm; returns the figure that chose the checkpoint, mostly the mean return.

    Args:
        options: of the algorithm.
        **opened: of BC and ILQL ``data``, an :class:`~torchrl_lang.recipes.offline.OfflineData`.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.algorithms import BC, train
        >>> options = BC(data=Path("runs/data"), out=Path("runs/bc"), steps=100)
        >>> train(options)
        Traceback (most recent call last):
            ...
        FileNotFoundError: There is no dataset in runs/data...
    """
    module, _, name = options.place.partition(":")
    with together(options):
        return getattr(importlib.import_module(f"torchrl_lang.recipes.{module}"), name)(options, **opened)
