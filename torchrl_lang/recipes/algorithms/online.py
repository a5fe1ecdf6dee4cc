"""The algorithms that learn from games of their policy: their options."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchrl_lang.recipes.algorithms.training import PRETRAINED, HeadOptions, RunOptions
from torchrl_lang.recipes.options import dashed, option, pairs, with_defaults

_PRETRAINED_ONLINE = {**PRETRAINED, "lr": 2e-5, "games": 64, "iterations": 40, "kl_coef": 0.05}
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
            given = "--start FOLDER, of a finished run or a model, or --pretrained NAME"
            raise ValueError(f"{self.algorithm} begins with a policy: give {given}.")

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
