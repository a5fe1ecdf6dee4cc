"""Online training: play games, add the KL penalty to their rewards, learn from them, repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_lang import _ranks
from torchrl_lang._random_stream import generators
from torchrl_lang.algorithm_distillation.language import RunRecorder
from torchrl_lang.data import row_buffer
from torchrl_lang.modules import MixedPolicy, UtteranceActor, ValueHead, save_language_model, with_frozen_states
from torchrl_lang.modules.drawn_utterances import joined_rows
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, adapters_off, frozen_copy
from torchrl_lang.modules.hugging_face import hidden_size
from torchrl_lang.modules.save import FEATURES_HEAD, SavedModel, saved_actor
from torchrl_lang.modules.saved_heads import Head
from torchrl_lang.modules.sharding import all_gathered
from torchrl_lang.recipes.algorithms.online import OnlineOptions
from torchrl_lang.recipes.algorithms.training import holds_model
from torchrl_lang.recipes.collect import AutocastPolicy, CollectedGames, Games
from torchrl_lang.recipes.engines import engine_figures, open_engine, score_as_trainer
from torchrl_lang.recipes.initial_model import choose_weights, load_pretrained, load_start
from torchrl_lang.recipes.load_run import FinishedRun, load_run, refuse_returns
from torchrl_lang.recipes.options import dashed
from torchrl_lang.recipes.runs import (
    FREE_OPTIONS,
    TrainableState,
    by_first,
    finish,
    is_due,
    make_optimizer,
    open_run,
    resume,
)
from torchrl_lang.recipes.stopping import stopping
from torchrl_lang.recipes.tasks import OWN_TASK
from torchrl_lang.recipes.tasks.base import Player, Task, check_features
from torchrl_lang.schema import FROZEN_STATES, RAW_REWARD, TOKEN_REWARD, TRAIN_MASK
from torchrl_lang.text import Tokenizer
from torchrl_lang.training import Checkpointer, Curriculum, NonFiniteError, RandomState, train_steps
from torchrl_lang.training.checkpoint import Stateful
from torchrl_lang.training.metrics import check_parameters, mean_figures
from torchrl_lang.training.progress import Progress
from torchrl_lang.transforms import (
    AdaptiveKLController,
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
    RowReference,
)


@dataclass(frozen=True)
class InitialPolicy:
    """A model at the beginning of online training."""

    task: Task
    tokenizer: Tokenizer
    lm: Any
    """The Hugging Face model."""
    value: ValueHead
    projector: Mapping[str, Head]
    """Its projector of features as a head, if it has one."""
    policy: UtteranceActor
    """Acts and is trained; it also writes state values."""
    reference: FrozenActor
    """The initial policy, frozen. It shares the frozen weights with the policy."""

    def save(self, folder: Path) -> Path:
        """Save the current model, with adapters merged."""
        heads = {"value": self.value, **self.projector}
        return save_language_model(folder, self.lm, heads, tokenizer=self.tokenizer.config())


def load_initial_policy(options: OnlineOptions) -> InitialPolicy:
    """Seed everything and load the model that ``options`` name; one that is not a run's needs their task.

    ``lora_rank`` adds adapters to frozen weights (:func:`~torchrl_lang.recipes.initial_model.choose_weights`), and the
    reference is the model without them. ``top_layers`` trains only the last blocks, and the reference shares the
    others. A projector of features trains with the model, but not beside adapters. Policies in worker processes each
    draw a random seed.

    Raises:
        ValueError: options contradict each other, the model is a decision transformer or has other tokens than the
            games, or it does not read the features that they show.
    """
    torch.manual_seed(options.seed)
    run, device, adapters = _open_start(options), options.torch_device(), options.lora_rank is not None
    embedding: Any = run.model.heads.get(FEATURES_HEAD)
    check_features(run.task, None if embedding is None else embedding.features, options.source)
    lm: Any = run.model.lm.to(device)
    projector = {name: head for name, head in run.model.heads.items() if name == FEATURES_HEAD}
    actor = saved_actor(SavedModel(lm, projector, None))
    if adapters and FEATURES_HEAD in projector:
        projector[FEATURES_HEAD].requires_grad_(False)  # the reference is the same actor without its adapters
    choose_weights(lm, options)
    heads = [run.model.heads.get(name) for name in ("state_value", "value")]  # the first is that of an agent
    found = (head for head in heads if isinstance(head, ValueHead))
    normalize = getattr(options, "normalize_states", False)
    value = next(found, None) or ValueHead(hidden_size(lm.config), normalize=normalize)
    control, longest = run.tokenizer.control, run.task.action_length
    make_policy = partial(UtteranceActor, actor, control, longest, temperature=options.temperature)
    seed = _ranks.own_seed(options.seed) if options.collector == "single" else None
    policy = make_policy(value=value.to(device), seed=seed)
    reference = adapters_off(make_policy()) if adapters else frozen_copy(make_policy())
    return InitialPolicy(run.task, run.tokenizer, lm, value, projector, policy, reference)


def _open_start(options: OnlineOptions) -> FinishedRun:
    """The task, model and tokenizer to begin with."""
    given = options.given_task()
    if options.start is not None and not holds_model(options.start):
        run = load_run(options.start, given, dtype=options.loaded_dtype())
        refuse_returns(options.start, run.model)
        return run
    if given is None:
        raise ValueError(f"{options.source} names no task: give --task NAME, or your own as --task {OWN_TASK}.")
    task = given.without_notes()
    tokenizer = task.tokenizer()
    if options.start is not None:
        model = load_start(options.start, tokenizer, options)
    else:
        model = SavedModel(load_pretrained(str(options.pretrained), tokenizer, options), {}, None)
    return FinishedRun(task, model, tokenizer, task.action_length)


class Learner:
    """How an online algorithm learns from games; a subclass sets ``loss`` and overrides what differs."""

    loss: LossModule
    rates: Sequence[tuple[nn.Module, float]] = ()
    """Modules of the loss with their own learning rates."""
    penalizes = False
    """Whether the KL penalty is a term of the loss instead of a part of the rewards."""

    def draw(self, play: Callable[[], TensorDictBase]) -> TensorDictBase:
        """Play, once or more often, and choose the rows to learn from; without any, an iteration learns nothing."""
        return self.choose(play())

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows to learn from, with all entries that the loss reads; ``rows`` contain the KL penalty."""
        raise NotImplementedError

    def losses(self, batch: TensorDictBase, iteration: int) -> TensorDictBase:
        """The losses to minimize in this iteration."""
        return self.loss(batch)

    def trains_policy(self, iteration: int) -> bool:
        """Whether the policy is trained in this iteration."""
        return True

    def metrics(self) -> Mapping[str, Tensor]:
        """Metrics of the chosen rows as a whole, in place of the means over the steps' batches."""
        return {}

    def parts(self) -> Mapping[str, Stateful]:
        """Further parts of a checkpoint."""
        return {}

    def restart(self) -> None:
        """Drop what depends on games that are not finished: new ones start."""


def _kl_weight(options: OnlineOptions) -> float:
    """The initial weight of a KL penalty in the loss, zero where it is in the rewards."""
    return getattr(options, "kl_weight", 0.0)


def kl_transform(options: OnlineOptions, start: InitialPolicy) -> KLConstrainedTransform:
    """The KL penalty on the rewards, and the controller of its coefficient, which a penalty in the loss has as well."""
    coef = options.kl_coef or _kl_weight(options)
    controller: Any = ConstantKLController(coef)
    if options.kl_target is not None:
        controller = AdaptiveKLController(coef, target=options.kl_target, horizon=options.kl_horizon)
    mask = TRAIN_MASK if options.examples else None  # no penalty on turns of the random player
    return KLConstrainedTransform(RowReference(start.reference), controller, estimator="k1", mask_key=mask)


def _player(options: OnlineOptions, start: InitialPolicy, policy: TensorDictModuleBase) -> Player:
    """The behaviour policy, and the environment options that it needs."""
    if not options.examples:
        return Player(policy)
    # In several processes each copy draws its own seed, as the policy does.
    seed = _ranks.own_seed(options.seed)
    seeds = (seed + 1, seed + 2) if options.collector == "single" else (None, None)
    player = start.task.player("random", seeds[0])
    return Player(MixedPolicy(policy, player.policy, options.examples, seed=seeds[1]), player.env_options)


_FREE = ("start", "pretrained", "workers", "ray_address", "ray_gpus", "record_history", "engine_option")
"""Options that may change when an online run is resumed; a changed start is recognized by its weights, and a history
by the epochs that it must have."""


@dataclass
class _Drawn:
    """The games that an iteration has played."""

    games: list[CollectedGames] = field(default_factory=list)
    rows: list[TensorDictBase] = field(default_factory=list)
    """The rows of these games with their KL penalty."""
    seconds: float = 0.0
    """Of the games alone."""


class OnlineRun:
    """The state of an online run, and its iterations; a recorder records the games of each."""

    def __init__(
        self,
        options: OnlineOptions,
        start: InitialPolicy,
        kl: KLConstrainedTransform,
        learner: Learner,
        recorder: RunRecorder | None = None,
    ) -> None:
        self.options, self.start, self.kl, self.learner, self.recorder = options, start, kl, learner, recorder
        steps, reference = options.iterations, start.reference
        self.optimizer, self.scheduler = make_optimizer(options, learner.loss, steps, reference, rates=learner.rates)
        self.engine = open_engine(options, start.lm, start.policy)
        self.policy = AutocastPolicy(start.policy) if options.bf16 else start.policy
        self.policy = self.policy if self.engine is None else self.engine.policy
        player = _player(options, start, self.policy)
        group = getattr(options, "group_size", None) or (1 if options.curriculum else None)
        in_groups = {} if group is None else {"group_size": group}
        self._streams = generators(player.policy)
        self.games = Games(
            start.task,
            player.policy,
            env_options={**player.env_options, **in_groups},
            kind=options.collector,
            workers=options.workers,
            games=options.games // _ranks.size(),
            turns=options.turns,
            seed=_ranks.own_seed(options.seed + 1000),  # other games than those of the evaluations
            device=options.torch_device(),
            max_staleness=options.max_staleness,
            cluster={"address": options.ray_address, "gpus": options.ray_gpus},
        )
        self.curriculum = None if options.curriculum is None else Curriculum(self.games.env, options.curriculum)

    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint. The reference and frozen weights are loaded from the initial policy instead."""
        streams = self._streams if self.options.collector == "single" else []
        drawn = {} if self.curriculum is None else {"curriculum": self.curriculum}
        own: dict[str, Stateful] = {
            "loss": TrainableState(self.learner.loss),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "kl": self.kl,
            **drawn,  # before the games, which begin as they did
            # Before the random states, because its collector calls the policy. Other processes begin other games.
            "games": _ranks.PerRank(self.games, reset=lambda state: self.games.restart(state["step"])),
            "random": _ranks.PerRank(
                RandomState(**{f"policy_{number}": stream for number, stream in enumerate(streams)})
            ),
        }
        return own | dict(self.learner.parts())

    def restart(self, step: int) -> None:
        """Begin new games that depend on ``step`` only; see :meth:`Games.restart`."""
        self.games.restart(step)
        if self.options.collector == "single":
            self.learner.restart()
            if self.curriculum is not None:
                self.curriculum.clear()

    def iterate(self, iteration: int, *, to_end: bool = False) -> dict[str, Any]:
        """Play games, add the KL penalty, learn, and send the new weights to the workers; returns metrics.

        With ``to_end`` all games are played to their end, because new ones start after this iteration.
        """
        began, busy = time.perf_counter(), time.process_time()
        drawn = _Drawn()
        chosen = self._draw(drawn, to_end)
        rows: Any = torch.cat(drawn.rows)  # typed as a tensor by torch
        coef = self.kl.coef.detach().clone()  # of the penalty in the rewards of these games
        if self.learner.trains_policy(iteration):
            self.kl.update(rows)
            coef = self.kl.coef.detach().clone() if self.learner.penalizes else coef  # the loss takes the new one
        if self.recorder is not None:
            self.recorder.record(iteration, torch.cat([each.rows for each in drawn.games]))
        try:
            learned = self._learn(chosen, iteration)
        except NonFiniteError as error:
            raise NonFiniteError(error.terms, f"{error.when} of iteration {iteration}") from error
        check_parameters(self.learner.loss, f"after iteration {iteration}")
        self.scheduler.step()
        self.weights_changed()
        self.start.policy.forget()  # a run that is resumed here has no cache either
        times = {"seconds_play": drawn.seconds, "seconds_learn": time.perf_counter() - began - drawn.seconds}
        times["seconds_processor"] = time.process_time() - busy
        # A loss may log a KL of its own as "kl"; the log shows that of the games.
        found = learned | dict(self.learner.metrics()) | self._metrics(drawn.games, rows) | {"kl_coef": coef}
        return found | {"learned_from": len(chosen)} | times

    def _draw(self, drawn: _Drawn, to_end: bool) -> TensorDictBase:
        """The rows to learn from; ``drawn`` receives all games that the learner plays for them."""
        with torch.autocast(self.options.torch_device().type, dtype=torch.bfloat16, enabled=self.options.bf16):
            with all_gathered():  # processes take turns of their own
                chosen = self.learner.draw(partial(self._play, drawn, to_end))
            if FROZEN_STATES not in chosen.keys() and len(chosen) and _ranks.size() == 1:  # of earlier games
                chosen = with_frozen_states(self.start.policy, chosen, decisions_only=True)
        return chosen

    def _play(self, drawn: _Drawn, to_end: bool) -> TensorDictBase:
        """Rows of new games with their KL penalty."""
        began = time.perf_counter()
        # Layers that never change are computed once, for acting, the reference and all epochs.
        with torch.autocast(self.options.torch_device().type, enabled=False), self.start.policy.keeping_states():
            own = self.games.play(to_end=to_end)  # the policy has an autocast of its own
        drawn.seconds += time.perf_counter() - began
        rows = with_frozen_states(self.start.policy, own.rows, decisions_only=True)
        rows = self.kl(rows if self.engine is None else score_as_trainer(self.start.policy, rows))
        if _ranks.size() > 1:  # every process has the rows of all, and learns from its share of each batch
            rows = gather_rows(rows.exclude(FROZEN_STATES))
            drawn.games.extend(_ranks.gather(own._replace(rows=own.rows.select().cpu())))  # they are counted alone
        else:
            drawn.games.append(own)
        drawn.rows.append(rows.exclude(FROZEN_STATES))
        if self.curriculum is not None:
            self.curriculum.update(own.rows)
        return rows.set(TOKEN_REWARD, rows.pop(RAW_REWARD)) if _kl_weight(self.options) else rows

    def weights_changed(self) -> None:
        """Send the current weights to the engine and the workers."""
        if self.engine is not None:
            self.engine.send_weights()
        self.games.weights_changed()

    def evaluate(self) -> dict[str, float]:
        """Metrics of the policy alone, sampled as in training, on games that are not learned from."""
        options = self.options
        games: Any = {"games": options.eval_games, "seed": options.seed + 1, "device": options.torch_device()}
        return self.start.task.evaluate(self.policy, **games)[0].scalars()

    def _learn(self, rows: TensorDictBase, iteration: int) -> dict[str, Tensor]:
        """Train for some epochs on the rows; returns the means of the steps' metrics."""
        options = self.options
        if not len(rows):
            self.optimizer.zero_grad()
            self.optimizer.step()  # changes nothing: the schedule expects a step before its own
            return {}
        number = -(-len(rows) // options.batch_size)
        size = -(-len(rows) // number)  # equal batches: a small last one would have the same weight as the others
        batches = options.epochs * -(-len(rows) // size)
        accumulate = min(options.accumulate, batches)
        device = options.torch_device()
        buffer = row_buffer(rows, size, seed=options.seed + iteration, share=(_ranks.rank(), _ranks.size()))

        def sample() -> TensorDictBase:
            batch = buffer.sample().to(device)
            if _ranks.size() == 1:  # its rows have these states already
                return batch
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16):
                return with_frozen_states(self.start.policy, batch, decisions_only=True)

        self.learner.loss.eval()  # no dropout, as in acting
        steps = train_steps(
            partial(self.learner.losses, iteration=iteration),
            sample,
            self.optimizer,
            steps=-(-batches // accumulate),
            accumulate=accumulate,
            max_grad_norm=options.max_grad_norm,
            clip_apart=[module for module, _ in self.learner.rates] if getattr(options, "clip_heads", False) else (),
            autocast=torch.bfloat16 if options.bf16 else None,
        )
        return mean_figures([figures for _, figures in steps])

    def _metrics(self, played: Sequence[CollectedGames], rows: TensorDictBase) -> dict[str, Any]:
        """Metrics of the games; returns are the environment's, without the KL penalty."""
        engine = {} if self.engine is None else engine_figures(rows)
        return engine | {
            "return": rows.get("raw_reward").sum(-1).mean(),
            "kl": rows.get("kl").sum(-1).mean(),
            "games": len(rows),
            "staleness": sum(each.staleness * len(each.rows) for each in played) / len(rows),
            "too_old": sum(each.dropped for each in played),
        }


def train_online(options: Any, make_learner: Callable[[Any, InitialPolicy, KLController], Learner]) -> float:
    """Train as :func:`~torchrl_lang.recipes.offline.train_offline` does, on games of the current policy.

    A run that was killed and resumed ends with the same numbers as an uninterrupted one if ``collector="single"``.
    Checkpoints contain neither the reference nor frozen weights: they are loaded from ``start`` again, and a changed
    ``start`` is refused. Returns the best mean return of the evaluations.
    """
    start = load_initial_policy(options)
    kl = kl_transform(options, start)
    learner = make_learner(options, start, kl.controller)
    _check_processes(options)
    source = options.source / "model" if (options.source / "model").is_dir() else options.source
    about: Any = {"fixed": {"notes": start.task.notes()}, "reference": f"the model in {source}, frozen"}
    about["from_pretrained"] = options.from_pretrained
    with open_run(options, free=_FREE, **about) as checkpoints, _recorder(options, start) as recorder:
        run = OnlineRun(options, start, kl, learner, recorder)
        with closing(run.games):
            _iterate(run, checkpoints)
        return finish(options, checkpoints, start.save, unit="iteration")


def _check_processes(options: OnlineOptions) -> None:
    """Raise ValueError for what the processes of ``torchrun`` cannot share."""
    number, group = _ranks.size(), getattr(options, "group_size", None) or 1
    if number == 1:
        return
    if options.games % (number * group):
        whole = f"{number} processes" + (f" in groups of {group}" if group > 1 else "")
        raise ValueError(f"--games {options.games} cannot be shared out to {whole}: give a multiple.")
    alone = {"collector": "single", "curriculum": None, "record_history": None, "engine": None}
    for name, value in alone.items():
        if getattr(options, name) != value:
            raise ValueError(f"The processes of torchrun play without --{dashed(name)}: leave it out, or torchrun.")


def gather_rows(rows: TensorDictBase) -> TensorDictBase:
    """The rows ``[N]`` of all processes, those of the first one first, on this process's device."""
    if _ranks.size() == 1:
        return rows
    every = joined_rows(_ranks.gather(rows.cpu()))
    return every if rows.device is None else every.to(rows.device)


def _recorder(options: OnlineOptions, start: InitialPolicy) -> AbstractContextManager[RunRecorder | None]:
    """Recorder of the games of a run, if the options ask for it."""
    if options.record_history is None:
        return nullcontext()
    config = {"algorithm": type(options).__name__, **asdict(options), "notes": start.task.notes()}
    name, free = options.out.resolve().name, (*FREE_OPTIONS, *_FREE)
    return RunRecorder(options.record_history, name, start.tokenizer, config=config, free=free, out=options.out)


def _iterate(run: OnlineRun, checkpoints: Checkpointer) -> None:
    """The remaining iterations."""
    options, last = run.options, run.options.iterations
    done, log = resume(options, checkpoints, run.parts())
    run.start.policy.forget()
    if run.engine is not None and done:
        run.engine.send_weights()
    if run.games.step is None:  # at the beginning
        run.restart(done)
    if run.recorder is not None:
        run.recorder.rewind(done)
    progress = Progress(last, label=options.out.name, start=done, unit="iteration", shown=("return", "kl", "eval"))
    # Interrupted because a worker has died, this process does not wait for the end of the iteration.
    stop = stopping(checkpoints, "iteration", check=run.games.check_workers)
    with closing(log), progress, stop as asked_to_stop:
        for iteration in range(done + 1, last + 1):
            evaluates = is_due(iteration, options.interval(last), last)
            figures = run.iterate(iteration, to_end=evaluates and iteration < last)
            progress.update(iteration, figures)
            if is_due(iteration, options.log_every, last):
                log.log(iteration, figures)
            scalars: dict[str, float] = {}
            if evaluates:
                scalars = by_first(run.evaluate, run.learner.loss)
                log.log(iteration, {f"eval_{key}": value for key, value in scalars.items()})
                progress.update(iteration, {"eval": scalars["return"]})
                run.restart(iteration)
            stops = asked_to_stop()
            if evaluates or stops:
                checkpoints.save(iteration, scalars)
            if stops:
                break
