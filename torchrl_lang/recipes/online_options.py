"""Options of the online recipes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torchrl_lang.recipes.collect import CollectorKind
from torchrl_lang.recipes.options import option, required, with_defaults
from torchrl_lang.recipes.run_common import RunOptions

__all__ = ["OnlineOptions"]


@with_defaults(lr=3e-4, warmup=10, final_lr=0.1, optimizer="adamw", eval_every=20, eval_games=512, log_every=1)
class OnlineOptions(RunOptions):
    """Options of all recipes that learn from games of the current policy."""

    task_from: ClassVar[tuple[str, str]] = ("start", "config.json")

    start: Path = required("folder of a finished run: the initial policy, and the reference of the KL penalty")
    iterations: int = option(200, "training iterations, each with new games", at_least=1)
    games: int = option(256, "games played in parallel", at_least=1)
    turns: int = option(6, "turns of each of them in an iteration", at_least=1)
    collector: CollectorKind = option("single", "single: in this process; sync, async: in worker processes")
    workers: int = option(2, "number of worker processes", at_least=1)
    max_staleness: int | None = option(
        None, "drop games with tokens sampled more than this number of weight updates ago", at_least=0
    )
    examples: float = option(
        0.0, "probability that a turn is played by a random player and excluded from the loss", at_least=0, below=1
    )
    epochs: int = option(2, "epochs over the games of an iteration", at_least=1)
    accumulate: int = option(1, "batches per optimizer step", at_least=1)
    kl_coef: float = option(0.2, "initial KL coefficient", at_least=0)
    kl_target: float | None = option(4.0, "target KL, in nats per game; none keeps the coefficient constant", above=0)
    kl_horizon: int = option(1000, "games in which the coefficient changes by at most a fifth", at_least=1)
    temperature: float = option(1.0, "temperature of the policy, in games and in the loss", above=0)
    lora_rank: int | None = option(None, "train LoRA adapters of this rank, not the weights (needs peft)", at_least=1)
    record_history: Path | None = option(
        None, "folder to record the games of each iteration in, as run-NAME by the name of --out; none: not recorded"
    )

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
                f"kl_coef must be above 0 with kl_target={self.kl_target}, got 0. For rewards without a KL penalty "
                "give --kl-coef 0 --kl-target none."
            )
