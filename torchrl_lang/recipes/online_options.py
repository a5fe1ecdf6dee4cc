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
    iterations: int = option(200, "times of playing and learning", at_least=1)
    games: int = option(256, "games played side by side", at_least=1)
    turns: int = option(6, "turns of each of them between two updates", at_least=1)
    collector: CollectorKind = option("single", "who plays: this process; workers; or workers that play on meanwhile")
    workers: int = option(2, "worker processes, where there are any", at_least=1)
    max_staleness: int | None = option(
        None, "games played by weights that are more updates old are left out", at_least=0
    )
    examples: float = option(
        0.0, "probability of a random admissible turn, remembered and not learned from", at_least=0, below=1
    )
    epochs: int = option(2, "times that each game is learned from", at_least=1)
    batch_size: int = option(64, "games in a batch", at_least=1)
    accumulate: int = option(1, "batches a step of the optimiser", at_least=1)
    lr: float = option(3e-4, "peak learning rate of AdamW; Muon's is ten times that", above=0, at_most=1)
    warmup: int = option(10, "iterations until the peak, at most a tenth of all", at_least=0)
    final_lr: float = option(0.1, "learning rate at the end, as a share of the peak", at_least=0, at_most=1)
    optimizer: Literal["muon", "adamw"] = option("adamw", "muon: for matrices, with AdamW for the rest")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm", above=0)
    kl_coef: float = option(0.2, "what a nat of divergence from the start costs, at first", at_least=0)
    kl_target: float | None = option(
        4.0, "divergence sought, in nats a game; none keeps the coefficient as it is", above=0
    )
    kl_horizon: int = option(1000, "games over which the coefficient may change by a fifth", at_least=1)
    temperature: float = option(1.0, "of the policy's logits, in playing and in learning", above=0)
    top_layers: int | None = option(
        None, "train only so many of the last transformer blocks; none trains all", at_least=1
    )
    lora_rank: int | None = option(
        None, "train LoRA adapters of this rank instead of the weights (needs peft)", at_least=1
    )
    device: str = option("auto", "cpu, cuda, ...; auto takes a GPU where there is one")
    bf16: bool = option(False, "compute in bfloat16")
    eval_every: int = option(20, "iterations between evaluations, each with a checkpoint", at_least=1)
    eval_games: int = option(512, "games an evaluation", at_least=1)
    log_every: int = option(1, "iterations between rows of the log", at_least=1)
    logger: tuple[str, ...] = option((), "further loggers: tensorboard, wandb, mlflow, trackio")
    seed: int = option(0, "seed of games and words", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collector != "single" and self.games % self.workers:
            raise ValueError(f"games={self.games} cannot be shared out to {self.workers} workers: give a multiple.")
        most = self.epochs * -(-self.games * self.turns // self.batch_size)
        if self.accumulate > most:
            raise ValueError(
                f"accumulate={self.accumulate} batches never come together: an iteration has at most {most}, from "
                f"games={self.games}, turns={self.turns}, epochs={self.epochs} and batch_size={self.batch_size}."
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"kl_coef must be above 0 with kl_target={self.kl_target}, got 0. To leave the divergence out of the "
                "rewards give --kl-coef 0 --kl-target none."
            )
