"""The training loop as a generator: it yields after every step, and the caller logs, evaluates and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import TargetNetUpdater

from torchrl_lang import _ranks
from torchrl_lang._checks import check_options
from torchrl_lang.modules.sharding import parts_of, share_gradients, whole_tensor
from torchrl_lang.schema import missing_entry
from torchrl_lang.training.metrics import GRAD_NORM, FiniteCheck, mean_figures


def total_loss(losses: TensorDictBase) -> Tensor:
    """Sum of all ``loss_*`` entries, the scalar that a training step minimizes.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.training import total_loss
        >>> losses = TensorDict(loss_value=torch.tensor(1.0), loss_actor=torch.tensor(2.0), entropy=torch.tensor(9.0))
        >>> total_loss(losses)
        tensor(3.)
    """
    terms = {key: value for key, value in losses.items() if isinstance(key, str) and key.startswith("loss_")}
    if not terms:
        raise missing_entry("A training step", ["loss_..."], losses, "Return the terms to minimize under such names.")
    for key, value in terms.items():
        if value.numel() != 1:
            raise ValueError(f"'{key}' has shape {tuple(value.shape)}, not one number: use reduction='mean'.")
    return torch.stack([value.reshape(()) for value in terms.values()]).sum()


def train_steps(
    loss_module: Callable[[TensorDictBase], TensorDictBase],
    batches: Callable[[], TensorDictBase] | Iterable[TensorDictBase],
    optimizer: Optimizer,
    *,
    steps: int,
    start: int = 0,
    accumulate: int = 1,
    scheduler: LRScheduler | None = None,
    target_updater: TargetNetUpdater | None = None,
    max_grad_norm: float | None = None,
    clip_apart: Sequence[nn.Module] = (),
    autocast: torch.dtype | None = None,
    finite: FiniteCheck | None = None,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Train until step ``steps``; yields the number of steps done and the detached metrics of the step.

    When it yields, the step is complete and the next one has not begun: a checkpoint saved there, restored and
    continued with ``start=step`` computes the same numbers as an uninterrupted run.

    Args:
        loss_module: a loss module, or any function from a batch to a tensordict with ``loss_*`` (summed and minimized)
            and optionally metrics.
        batches: a function that returns a batch, such as ``replay_buffer.sample``, or an iterable that is repeated.
        optimizer: optimizes the loss module's parameters.
        steps: total number of optimizer steps.
        start: number of steps done before.
        accumulate: batches per step; their losses are averaged with equal weights.
        scheduler: stepped after the optimizer.
        target_updater: stepped after the optimizer.
        max_grad_norm: clip the total norm of the gradients; the metrics then include ``grad_norm``.
        clip_apart: modules, such as value heads, whose gradients are clipped to that norm apart from all others, so
            that large ones do not scale down those of a policy; the metrics then include ``grad_norm_apart``.
        autocast: dtype of autocast for the loss, ``torch.bfloat16``.
        finite: checks for losses and gradients that are NaN or infinite; by default a new check. Pass one if training
            runs on a GPU, and call its ``check()`` before weights are used or saved. Gradients are checked by their
            norm, so only with ``max_grad_norm``.

    Yields:
        ``(step, metrics)``: the loss module's scalars, ``loss`` (the sum that was minimized) and, with a scheduler,
        ``lr``.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the message names the term and the step. On a CPU it is
            raised before the optimizer's step, so the parameters are those of the previous step. On a GPU, to avoid
            synchronization, it is raised some steps later, and for the last step before it is yielded.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.training import train_steps
        >>> x = torch.nn.Parameter(torch.tensor(1.0))
        >>> loss = lambda batch: TensorDict(loss_square=(x - batch["target"]) ** 2)
        >>> batch = TensorDict(target=torch.tensor(0.0))
        >>> for step, figures in train_steps(loss, lambda: batch, torch.optim.AdamW([x], 0.1), steps=50):
        ...     pass
        >>> step, bool(figures["loss"] < 0.01)
        (50, True)
    """
    check_options(accumulate=(accumulate, 1), autocast=(autocast, (None, torch.bfloat16)))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = {p for module in clip_apart for p in parts_of(module).parameters()}
    apart, together = [p for p in parameters if p in named], [p for p in parameters if p not in named]
    precision = partial(torch.autocast, parameters[0].device.type, dtype=autocast) if autocast else nullcontext
    draw = batches if callable(batches) else _draw_from(batches)
    finite = FiniteCheck() if finite is None else finite
    for step in range(start + 1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for _ in range(accumulate):
            with precision(), _ranks.shared_batch():
                losses = loss_module(draw())
                loss = total_loss(losses)
            (loss / accumulate).backward()
            scalars = {str(key): value.detach().reshape(()) for key, value in losses.items() if value.numel() == 1}
            parts.append(scalars | {"loss": loss.detach()})
        _ranks.average_gradients(parameters)
        share_gradients()
        figures = _ranks.mean_figures(parts[0] if accumulate == 1 else mean_figures(parts))
        if max_grad_norm is not None:
            figures[GRAD_NORM] = _clip(together, max_grad_norm)
            if apart:
                figures[f"{GRAD_NORM}_apart"] = _clip(apart, max_grad_norm)
        if scheduler is not None:
            figures["lr"] = torch.as_tensor(scheduler.get_last_lr()[0])
        finite.add(step, figures)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if target_updater is not None:
            target_updater.step()
        if step == steps:
            finite.check()
        yield step, figures


def _clip(parameters: list[Tensor], limit: float) -> Tensor:
    """Clip the total norm of gradients; returns what it was."""
    parts = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (False, True)]
    if not parts[1]:
        return nn.utils.clip_grad_norm_(parameters, limit).detach()
    grads = [[p.grad for p in part if p.grad is not None] for part in parts]  # torch does not mix the two kinds
    norms = [whole_tensor(nn.utils.get_total_norm(each)) for each in grads if each]
    norm = torch.stack(norms).norm() if norms else torch.zeros(())  # in a value warmup the policy has no gradient
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, limit, norm)
    return norm


def _draw_from(batches: Iterable[TensorDictBase]) -> Callable[[], TensorDictBase]:
    def around() -> Iterator[TensorDictBase]:
        while True:
            batch = None
            for batch in batches:
                yield batch
            if batch is None:
                raise ValueError("The batches ran out: give an iterable that can be iterated again, or a function.")

    return around().__next__
