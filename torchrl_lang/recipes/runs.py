"""Run a training: record its options, resume, train, evaluate, save, and stop with a checkpoint."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, TensorDictParams
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import LossModule, SoftUpdate

from torchrl_lang import _ranks
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, HeldActor, fingerprint
from torchrl_lang.modules.frozen.frozen_states import block_list
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.modules.sharding import (
    SharedHeads,
    all_gathered,
    any_sharded,
    local_part,
    parts_of,
    shard,
    unshard,
    whole_tensor,
)
from torchrl_lang.modules.trunk import trunk_of
from torchrl_lang.objectives.networks import frozen_target
from torchrl_lang.recipes.algorithms.training import LoopOptions, TrainingOptions
from torchrl_lang.recipes.datasets import output_folder
from torchrl_lang.recipes.options import write_config
from torchrl_lang.recipes.records import check_record, write_options
from torchrl_lang.recipes.stopping import stopping
from torchrl_lang.training import (
    Checkpointer,
    FiniteCheck,
    RandomState,
    RunLog,
    WeightAverage,
    adamw,
    muon_adamw,
    train_steps,
    warmup_cosine,
)
from torchrl_lang.training.checkpoint import Stateful
from torchrl_lang.training.logging import make_log
from torchrl_lang.training.metrics import check_parameters
from torchrl_lang.training.progress import Progress

T = TypeVar("T")

FREE_OPTIONS = ("out", "logger", "device", "task", "option", "shard")
"""Options that may change when any run is resumed; the task is among the notes."""


@contextmanager
def open_run(
    options: TrainingOptions, *, free: tuple[str, ...], fixed: Mapping[str, Any], best_by: str = "return", **more: Any
) -> Iterator[Checkpointer]:
    """Hold the folder of a run exclusively and record its options, or check that a resumed run has the same ones.

    The ``free`` options may change when a run is resumed. ``fixed`` and ``more`` are further content of
    ``config.json``; what is ``fixed``, the task among it, may not change, nor may the algorithm. The best
    checkpoint has the highest ``best_by``.
    """
    options.check_machine()
    with output_folder(options.out, "trains") if _ranks.is_first() else nullcontext():
        checkpoints, record = Checkpointer(options.out / "checkpoints", best_by=best_by), options.out / "config.json"
        free, fixed = (*FREE_OPTIONS, *free), {"algorithm": options.algorithm, **fixed}
        if checkpoints.steps() and _ranks.is_first():
            check_record(record, options, free=free, **fixed)
        elif _ranks.is_first():
            write_options(record, options, **fixed, **more)
            write_config(options.out / "config.yaml", options)
        _ranks.wait()
        yield checkpoints


_TARGET = "target_actor_network_params"
"""The target model of Q-SFT, of which each process has its part if models are sharded."""
_HEADS = re.compile("(target_)?q?value_network(_params)?")
"""The names of a loss's value heads."""


def by_first(evaluate: Callable[[], T], loss: LossModule) -> T:
    """Evaluate the models and the loss in the first process, for which the others wait; all get the result."""
    target = loss._modules.get(_TARGET) if any_sharded() else None
    if target is not None:
        loss._modules[_TARGET] = TensorDictParams(target.data.apply(whole_tensor), no_convert=True)
    with all_gathered():
        found = _ranks.from_first(evaluate)
    loss._modules.update({} if target is None else {_TARGET: target})
    return found


def shard_models(loss: LossModule, *others: HeldActor) -> None:
    """Shard the language models of a loss, its heads, those of its reference and of other actors over the processes."""
    mesh = init_device_mesh(next(loss.parameters()).device.type, (_ranks.size(),))
    held = [actor for actor in (getattr(loss, "reference", None), *others) if actor is not None]
    for actor in held:
        _ = actor.fingerprint if isinstance(actor, FrozenActor) else None  # of the whole weights
    actors = [module for module in (loss, *(actor.actor for actor in held)) for module in module.modules()]
    for actor in dict.fromkeys(actors):
        if isinstance(actor, ProbabilisticTensorDictSequential):
            _shard_actor(actor, mesh)
    if _TARGET in loss._modules:
        loss._modules[_TARGET] = frozen_target(loss.actor_network_params)
    if heads := [name for name in loss._modules if _HEADS.fullmatch(name)]:
        SharedHeads(loss, heads, mesh)


class _ShardedTargets:
    """Moves target networks whose weights are sharded: TorchRL's updaters take no such weights."""

    def __init__(self, loss: LossModule, tau: float) -> None:
        self.loss, self.tau = loss, tau
        loss._has_update_associated.update(dict.fromkeys(loss._has_update_associated, True))  # or TorchRL warns

    @torch.no_grad()
    def step(self) -> None:
        """Step as :class:`~torchrl.objectives.SoftUpdate` does."""
        for name, target in self.loss._modules.items():
            if name.startswith("target_"):
                for key, source in getattr(self.loss, name.removeprefix("target_")).items(True, True):
                    local_part(target.get(key)).lerp_(local_part(source.data), self.tau)


def _shard_actor(actor: ProbabilisticTensorDictSequential, mesh: DeviceMesh) -> None:
    """Shard an actor's blocks and its language model, once; also those of a frozen copy."""
    trunk: Any = trunk_of(split_actor(actor).trunk)
    if trunk.sharded_root is not None:
        return
    if not trunk._owners:  # a copy, which has no language model around it yet
        trunk._owners = (language_model_of(actor), trunk.model)
    shard(trunk._owners[-2], block_list(trunk.model)[1], mesh)


def _updater(loss: LossModule, tau: float | None) -> Any:
    if tau is None:
        return None
    return _ShardedTargets(loss, tau) if any_sharded() else SoftUpdate(loss, tau=tau)


def make_optimizer(
    options: TrainingOptions,
    loss: LossModule,
    steps: int,
    *others: HeldActor,
    rates: Sequence[tuple[nn.Module, float]] = (),
    **settings: Any,
) -> tuple[Optimizer, LRScheduler]:
    """The optimizer, and its schedule of warmup and decay over ``steps`` steps.

    With ``--shard`` models are sharded now: those of the loss and the ``others`` that are run beside it.
    """
    _ranks.equal(loss)
    if getattr(options, "shard", False):
        shard_models(loss, *others)
    if any(weight.requires_grad and weight.dtype == torch.bfloat16 for weight in loss.parameters()):
        remedy = "train adapters (--lora-rank), or give --dtype float32 --bf16"
        warnings.warn(f"Weights that train in bfloat16 lose updates below .2 % of their size: {remedy}.", stacklevel=2)
    make = muon_adamw if options.optimizer == "muon" else adamw
    optimizer = make(loss, options.lr, rates=[(parts_of(module), rate) for module, rate in rates], **settings)
    warmup = min(options.warmup, steps // 10)
    return optimizer, warmup_cosine(optimizer, steps, warmup=warmup, final=options.final_lr)


def resume(options: TrainingOptions, checkpoints: Checkpointer, parts: Mapping[str, Stateful]) -> tuple[int, RunLog]:
    """Restore ``parts`` from the last checkpoint. Returns the number of completed steps, and the log up to there."""
    for name, part in parts.items():
        checkpoints.register(name, part)
    done = checkpoints.restore() or 0
    log = make_log(options.out, trackers=options.logger)
    log.rewind(done or None)
    return done, log


def is_due(step: int, every: int, last: int) -> bool:
    """Whether ``step`` is a multiple of ``every`` or the last one."""
    return step % every == 0 or step == last


def finish(
    options: TrainingOptions,
    checkpoints: Checkpointer,
    save: Callable[[Path], Any],
    *,
    unit: str,
    average: WeightAverage | None = None,
    describe: Callable[[float], str] = "mean return {:.2f}".format,
) -> float:
    """Save the best checkpoint as the run's model, the last one if none has the metric. Returns the best metric or NaN.

    Args:
        options: of the run.
        checkpoints: of the run.
        save: writes the restored model to a folder.
        unit: of the checkpoints' steps.
        average: of the weights, which takes their place.
        describe: the best metric in words.
    """
    if _ranks.is_first():
        checkpoints.prune()  # a run that was killed in its last save still has the old ones
    _ranks.wait()
    best = checkpoints.restore("best")
    found = checkpoints.metrics("best").get(checkpoints.best_by, math.nan)
    chosen = f"best at {unit} {best}, {describe(found)}"
    if best is None:
        chosen = f"last checkpoint at {unit} {checkpoints.restore()}, as no figure was measured to choose by"
    if average is not None:
        average.apply()
    model = options.out / "model"
    unshard(keep=_ranks.is_first())
    if _ranks.is_first():
        save(model)
    print(f"{options.out.name}: {chosen}; model in {model}", flush=True)
    return found


_FINGERPRINT = "frozen_fingerprint"


class TrainableState:
    """The state of a module, with a fingerprint in place of its frozen parameters.

    A resumed run loads the frozen parameters from where the first call loaded them; the fingerprint is verified.
    Buffers are in the state, and so are a loss's target parameters.

    Args:
        module: parameters of it that require no gradient are left out.

    Examples:
        >>> import torch
        >>> from torchrl_lang.recipes.runs import TrainableState
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
        >>> list(TrainableState(net).state_dict())
        ['1.weight', '1.bias', 'frozen_fingerprint']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """Trainable parameters, buffers and, if anything is frozen, the fingerprint, uint8 ``[32]``."""
        frozen = self._frozen()
        kept = {name: value for name, value in self.module.state_dict().items() if name not in frozen}
        return kept | ({_FINGERPRINT: self._fingerprint} if frozen else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; frozen parameters stay as they are.

        Raises:
            ValueError: the state belongs to other frozen parameters. Nothing has been loaded then.
            RuntimeError: names of parameters are missing or unexpected.
        """
        frozen, state = self._frozen(), dict(state_dict)
        expected = state.pop(_FINGERPRINT, None)
        if frozen and (expected is None or not torch.equal(expected.cpu(), self._fingerprint)):
            raise ValueError("it was made beside other frozen weights: continue it from the model it started from.")
        self.module.load_state_dict(frozen | state)

    def _frozen(self) -> dict[str, Tensor]:
        state = self.module.state_dict(keep_vars=True)
        return {
            name: value for name, value in state.items() if isinstance(value, nn.Parameter) and not value.requires_grad
        }

    @cached_property
    def _fingerprint(self) -> Tensor:
        """Computed once, because it takes a second per gigabyte and frozen parameters do not change."""
        return fingerprint(self._frozen().items())


def train_and_evaluate(
    options: LoopOptions,
    checkpoints: Checkpointer,
    loss: LossModule,
    sample: Callable[[], TensorDictBase],
    evaluate: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]],
    save: Callable[[Path], Any],
    *,
    tau: float | None = None,
    rates: Sequence[tuple[nn.Module, float]] = (),
    shown: str | None = None,
    describe: Callable[[float], str] = "mean return {:.2f}".format,
    **batches: Stateful,
) -> float:
    """Train from the last checkpoint; each evaluation is logged and makes a checkpoint, the best becomes the model.

    SIGINT and SIGTERM end it after the step with a checkpoint, see :func:`~torchrl_lang.recipes.stopping.stopping`.

    Args:
        options: of the run.
        checkpoints: of the run.
        loss: to minimize.
        sample: the next batch.
        evaluate: figures of the model that are saved with its checkpoint, the one that chooses it among them, and
            further ones that are logged.
        save: writes the trained model to a folder.
        tau: rate at which the loss's target parameters follow the trained ones, if it has some.
        rates: modules of the loss with their own learning rates, the heads that ``clip_heads`` is about.
        shown: the figure to show during training; default the one that chooses the checkpoint.
        describe: the figure that chooses the checkpoint, in words.
        **batches: what a checkpoint has of the order of batches.

    Returns:
        The best figure; the loss has the weights of the model then.
    """
    device, steps = options.torch_device(), options.steps
    optimizer, scheduler = make_optimizer(options, loss, steps, weight_decay=options.weight_decay, rates=rates)
    updater = _updater(loss, tau)  # before a checkpoint is loaded: it begins with equal weights
    average = WeightAverage(loss, options.ema_decay) if options.ema_decay else None
    parts: dict[str, Any] = {"loss": TrainableState(loss), "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"average": average} if average is not None else {}
    start, log = resume(options, checkpoints, {**parts, **batches, "random": _ranks.PerRank(RandomState())})
    finite = FiniteCheck()
    training = train_steps(
        loss,
        lambda: sample().to(device),
        optimizer,
        steps=steps,
        start=start,
        scheduler=scheduler,
        target_updater=updater,
        max_grad_norm=options.max_grad_norm,
        clip_apart=[module for module, _ in rates] if getattr(options, "clip_heads", False) else (),
        autocast=torch.bfloat16 if options.bf16 else None,
        finite=finite,
    )
    progress = Progress(steps, label=options.out.name, start=start, shown=("loss", shown or checkpoints.best_by))
    with closing(log), progress, stopping(checkpoints, "step") as asked_to_stop:
        for step, figures in training:
            if average is not None:
                average.update()
            progress.update(step, figures)
            if is_due(step, options.log_every, steps):
                log.log(step, figures)
            evaluates, stops = is_due(step, options.interval(steps), steps), asked_to_stop()
            if not (evaluates or stops):
                continue
            finite.check()
            check_parameters(loss, f"after step {step}")
            found: Mapping[str, float] = {}
            if evaluates:
                with nullcontext() if average is None else average.applied():
                    found, further = by_first(evaluate, loss)
                log.log(step, {**found, **further})
                progress.update(step, {**found, **further})
            checkpoints.save(step, found)
            if stops:
                break

    return finish(options, checkpoints, save, unit="step", average=average, describe=describe)
