"""Online training: games are played, kept near the start, learned from, and played again with the new weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_lang.data import row_buffer
from torchrl_lang.functional import generators
from torchrl_lang.modules import MixedPolicy
from torchrl_lang.recipes.collection import Games, InPrecision, Played
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import check_record, write_options
from torchrl_lang.recipes.runs import finish, is_due, make_optimizer, resume, run_folder
from torchrl_lang.recipes.start import Start, load_start
from torchrl_lang.recipes.unfrozen import Unfrozen
from torchrl_lang.schema import TRAIN_MASK
from torchrl_lang.training import (
    Checkpointer,
    NonFiniteError,
    Progress,
    RandomState,
    Stateful,
    check_parameters,
    seed_everything,
    train_steps,
)
from torchrl_lang.transforms import AdaptiveKLController, ConstantKLController, KLConstrainedTransform

__all__ = ["Learner", "OnlineRun", "begin", "keep_near", "train_online"]


class Learner(Protocol):
    """What is learned from games, and from which of them."""

    loss: LossModule

    @property
    def rates(self) -> Sequence[tuple[nn.Module, float]]:
        """Modules of the loss that learn at a rate of their own."""

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """From the games just played, kept near the start, those to learn from, with all that the loss reads."""

    def losses(self, batch: TensorDictBase, iteration: int) -> TensorDictBase:
        """What is minimised in this iteration."""

    def moves_policy(self, iteration: int) -> bool:
        """Whether the policy learns in this iteration, or only what will judge it."""

    def parts(self) -> Mapping[str, Stateful]:
        """What else a checkpoint must hold."""


def begin(options: OnlineOptions) -> Start:
    """Seed everything and take the model that the run starts from."""
    seed_everything(options.seed)
    return load_start(
        options.start,
        options.torch_device(),
        lora_rank=options.lora_rank,
        top_layers=options.top_layers,
        temperature=options.temperature,
        seed=options.seed if options.collector == "single" else None,
    )


def keep_near(options: OnlineOptions, start: Start) -> KLConstrainedTransform:
    """What pays in the rewards for the divergence from the start; its controller says how much a nat costs."""
    controller: Any = ConstantKLController(options.kl_coef)
    if options.kl_target is not None:
        controller = AdaptiveKLController(options.kl_coef, target=options.kl_target, horizon=options.kl_horizon)
    paid = TRAIN_MASK if options.examples else None  # nothing is paid for what another said
    return KLConstrainedTransform(start.reference, controller, estimator="k1", mask_key=paid)


def _player(
    options: OnlineOptions, start: Start, policy: TensorDictModuleBase
) -> tuple[TensorDictModuleBase, dict[str, Any]]:
    """Who plays the games to learn from, and what the environment must offer for it."""
    if not options.examples:
        return policy, {}
    # As with the policy's words: copies in several processes are not to draw the same.
    seeds = (options.seed + 1, options.seed + 2) if options.collector == "single" else (None, None)
    example, offered = start.task.example(seeds[0])
    return MixedPolicy(policy, example, options.examples, seed=seeds[1]), offered


class OnlineRun:
    """Everything that an iteration of playing and learning needs."""

    def __init__(self, options: OnlineOptions, start: Start, near: KLConstrainedTransform, learner: Learner) -> None:
        self.options, self.start, self.near, self.learner = options, start, near, learner
        self.optimizer, self.scheduler = make_optimizer(options, learner.loss, options.iterations, rates=learner.rates)
        self.policy = InPrecision(start.policy, torch.bfloat16) if options.bf16 else start.policy
        player, offered = _player(options, start, self.policy)
        self._streams = generators(player)
        self.games = Games(
            start.task,
            player,
            offered=offered,
            kind=options.collector,
            workers=options.workers,
            games=options.games,
            turns=options.turns,
            seed=options.seed + 1000,  # not the games of the evaluations
            device=options.torch_device(),
            max_staleness=options.max_staleness,
        )

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint must hold. The reference and what is frozen are made anew from the start."""
        playing = self._streams if self.options.collector == "single" else []
        words = {f"words_{number}": stream for number, stream in enumerate(playing)}
        own: dict[str, Stateful] = {
            "loss": Unfrozen(self.learner.loss),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "near": self.near,
            "random": RandomState(**words),
        }
        return own | dict(self.learner.parts())

    def iterate(self, iteration: int, *, to_end: bool = False) -> dict[str, Any]:
        """Play, ``to_end`` where the games begin anew after it, pay for the divergence, learn, hand out the weights.

        Returns:
            Figures.
        """
        began = time.perf_counter()
        played = self.games.play(to_end=to_end)
        middle = time.perf_counter()
        with torch.autocast(self.options.torch_device().type, dtype=torch.bfloat16, enabled=self.options.bf16):
            rows = self.near(played.rows)
            if self.learner.moves_policy(iteration):
                self.near.update(rows)
            chosen = self.learner.choose(rows)
        try:
            learned = self._learn(chosen, iteration)
        except NonFiniteError as error:
            raise NonFiniteError(error.terms, f"{error.when} of iteration {iteration}") from error
        check_parameters(self.learner.loss, f"after iteration {iteration}")
        self.scheduler.step()
        self.games.weights_changed()
        seconds = {"seconds_play": middle - began, "seconds_learn": time.perf_counter() - middle}
        # A loss may have a divergence of its own under the same name: the one in the rewards is meant.
        return learned | self._figures(played, rows) | {"learned_from": len(chosen)} | seconds

    def judge(self) -> dict[str, float]:
        """Figures of games that are not learned from; the policy speaks as it does in playing."""
        options = self.options
        summary, _ = self.start.task.judge(
            self.policy, games=options.eval_games, seed=options.seed + 1, device=options.torch_device()
        )
        return summary.scalars()

    def _learn(self, rows: TensorDictBase, iteration: int) -> dict[str, Tensor]:
        """Some epochs over the rows; the mean of the steps' figures."""
        options = self.options
        number = -(-len(rows) // options.batch_size)
        size = -(-len(rows) // number)  # all about as large: a last, small one would weigh as much as the others
        batches = options.epochs * -(-len(rows) // size)
        accumulate = min(options.accumulate, batches)  # few games may have ended
        device = options.torch_device()
        buffer = row_buffer(rows, size, seed=options.seed + iteration)
        self.learner.loss.eval()  # a policy learns as it acts, without dropout
        steps = train_steps(
            partial(self.learner.losses, iteration=iteration),
            lambda: buffer.sample().to(device),
            self.optimizer,
            steps=-(-batches // accumulate),
            accumulate=accumulate,
            max_grad_norm=options.max_grad_norm,
            autocast=torch.bfloat16 if options.bf16 else None,
        )
        found = [figures for _, figures in steps]
        return {key: torch.stack([figures[key].float() for figures in found]).mean() for key in found[0]}

    def _figures(self, played: Played, rows: TensorDictBase) -> dict[str, Any]:
        """How the games went: returns are the environment's, without what the divergence costs."""
        return {
            "return": rows.get("raw_reward").sum(-1).mean(),
            "kl": rows.get("kl").sum(-1).mean(),
            "kl_coef": self.near.coef.detach().clone(),
            "games": len(rows),
            "staleness": played.staleness,
            "too_old": played.dropped,
        }


def train_online(options: OnlineOptions, start: Start, near: KLConstrainedTransform, learner: Learner) -> float:
    """Play and learn; at the end the best checkpoint by return becomes the run's model.

    The run's folder holds ``config.json``, ``log.csv``, ``checkpoints`` and, at the end, ``model``. A run that was
    killed goes on from its last checkpoint; where one process plays, to the same numbers as one that was not.
    Checkpoints hold neither the reference nor frozen weights: they are made anew from ``start``, and a start that has
    changed is refused.

    One process at a time trains in a folder.

    Returns:
        The best mean return of the evaluations, of games that are not learned from.

    Raises:
        FileExistsError: another process trains in this folder.
        NonFiniteError: a loss, a gradient or a weight has become NaN or infinite; earlier checkpoints stay.
    """
    with run_folder(options.out):
        checkpoints = Checkpointer(options.out / "checkpoints")
        _record(options, start, continued=bool(checkpoints.steps()))
        run = OnlineRun(options, start, near, learner)
        with closing(run.games):
            try:
                _iterate(run, checkpoints)
            except KeyboardInterrupt:
                run.games.check_workers()  # which may be the reason
                raise
        return finish(options, checkpoints, start.save, unit="iteration")


def _iterate(run: OnlineRun, checkpoints: Checkpointer) -> None:
    """All iterations that are left."""
    options, last = run.options, run.options.iterations
    done, log = resume(options, checkpoints, run.parts())
    progress = Progress(last, label=options.out.name, start=done, unit="iteration", shown=("return", "kl", "eval"))
    with closing(log), progress:
        run.games.restart(done)
        for iteration in range(done + 1, last + 1):
            judged = is_due(iteration, options.eval_every, last)
            figures = run.iterate(iteration, to_end=judged)
            progress.update(iteration, figures)
            if is_due(iteration, options.log_every, last):
                log.log(iteration, figures)
            if judged:
                scalars = run.judge()
                log.log(iteration, {f"eval_{key}": value for key, value in scalars.items()})
                progress.update(iteration, {"eval": scalars["return"]})
                checkpoints.save(iteration, scalars)
                run.games.restart(iteration)


def _record(options: OnlineOptions, start: Start, *, continued: bool) -> None:
    """Write down what the run is, or make sure that what is to be continued is the same."""
    path = options.out / "config.json"
    if continued:  # a start that is another one by now is known by its weights
        free = ("start", "out", "logger", "device", "workers")
        check_record(path, options, free=free, notes=start.task.notes())
    else:
        reference = f"the model in {options.start / 'model'}, frozen"
        write_options(path, options, notes=start.task.notes(), reference=reference)
