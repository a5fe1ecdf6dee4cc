"""Options of the recipes that learn from the games they play."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchrl_lang.recipes.collection import CollectorKind
from torchrl_lang.recipes.options import option, required
from torchrl_lang.recipes.runs import RunOptions

__all__ = ["OnlineOptions"]


@dataclass(frozen=True)
class OnlineOptions(RunOptions):
    """Options of every recipe that learns from the games it plays."""

    start: Path = required("folder of a finished run: where the policy starts, and what it is kept near")
    out: Path = required("folder of the run; a run that is there already is continued")
    iterations: int = option(200, "times of playing and learning")
    games: int = option(256, "games played side by side")
    turns: int = option(6, "turns of each of them between two updates")
    collector: CollectorKind = option("single", "who plays: this process; workers; or workers that play on meanwhile")
    workers: int = option(2, "worker processes, where there are any")
    max_staleness: int | None = option(None, "games played by weights that are more updates old are left out")
    examples: float = option(0.0, "probability of a random admissible turn, remembered and not learned from")
    epochs: int = option(2, "times that each game is learned from")
    batch_size: int = option(64, "games in a batch")
    accumulate: int = option(1, "batches a step of the optimiser")
    lr: float = option(3e-4, "peak learning rate of AdamW; Muon's is ten times that")
    warmup: int = option(10, "iterations until the peak, at most a tenth of all")
    final_lr: float = option(0.1, "learning rate at the end, as a share of the peak")
    optimizer: Literal["muon", "adamw"] = option("adamw", "muon: for matrices, with AdamW for the rest")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    kl_coef: float = option(0.2, "what a nat of divergence from the start costs, at first")
    kl_target: float | None = option(4.0, "divergence sought, in nats a game; none keeps the coefficient as it is")
    kl_horizon: int = option(1000, "games over which the coefficient may change by a fifth")
    temperature: float = option(1.0, "of the policy's logits, in playing and in learning")
    top_layers: int | None = option(None, "train only so many of the last transformer blocks; none trains all")
    lora_rank: int | None = option(None, "train LoRA adapters of this rank instead of the weights (needs peft)")
    device: str = option("auto", "cpu, cuda, ...; auto takes a GPU where there is one")
    bf16: bool = option(False, "compute in bfloat16")
    eval_every: int = option(20, "iterations between evaluations, each with a checkpoint")
    eval_games: int = option(512, "games an evaluation")
    log_every: int = option(1, "iterations between rows of the log")
    logger: tuple[str, ...] = option((), "further loggers: tensorboard, wandb, mlflow, trackio")
    seed: int = option(0, "seed of games and words")

    def __post_init__(self) -> None:
        names = ("iterations", "games", "turns", "workers", "epochs", "batch_size", "accumulate", "eval_every")
        self._check_at_least_one(*names, "eval_games", "log_every", "kl_horizon", "top_layers", "lora_rank")
        if self.collector != "single" and self.games % self.workers:
            raise ValueError(f"games={self.games} cannot be shared out to {self.workers} workers: give a multiple.")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"max_staleness must not be negative, got {self.max_staleness}: 0 takes no old games.")
        if not 0 <= self.examples < 1:
            raise ValueError(f"examples must lie in [0, 1), got {self.examples}: 0.05 is one turn in twenty.")
        if self.kl_coef < 0 or (self.kl_target is not None and (self.kl_target <= 0 or self.kl_coef == 0)):
            raise ValueError(
                "kl_coef must not be negative, and above 0 with a kl_target, which must be above 0: got "
                f"kl_coef={self.kl_coef}, kl_target={self.kl_target}. Without a price: --kl-coef 0 --kl-target none."
            )
