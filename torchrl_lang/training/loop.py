"""The training loop, as a generator: it yields after every step, and the caller logs, plays and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.objectives import TargetNetUpdater

from torchrl_lang.training.finite import GRAD_NORM, FiniteCheck

__all__ = ["total_loss", "train_steps"]


def total_loss(losses: TensorDictBase) -> Tensor:
    """Sum of every ``loss_*`` entry, a scalar: what a training step minimises.

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
        raise KeyError(f"A loss module must return entries named 'loss_...', got {sorted(map(str, losses.keys()))}.")
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
    autocast: torch.dtype | None = None,
    finite: FiniteCheck | None = None,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Train until step ``steps``; yield the number of steps done and that step's figures, detached, on their device.

    When it yields, everything that belongs to the step has been done and nothing of the next: a checkpoint taken there,
    restored, and continued with ``start=step`` gives the numbers of a run that never stopped.

    Args:
        loss_module: a loss module, or any function: batch -> tensordict with ``loss_*`` (summed and minimised) and
            perhaps metrics.
        batches: called for each batch, such as ``replay_buffer.sample``, or iterated over, again and again.
        optimizer: over the loss module's parameters.
        steps: of the optimiser, in all.
        start: steps done before.
        accumulate: batches a step; their losses are averaged, each batch counting alike.
        scheduler: stepped after the optimiser.
        target_updater: stepped after the optimiser.
        max_grad_norm: clip the norm of all gradients, which is then among the figures as ``grad_norm``.
        autocast: run the loss in this precision, ``torch.bfloat16``.
        finite: notices losses and gradients that are NaN or infinite, by default a check of its own. Give one where
            training runs on a GPU, to call its ``check()`` before weights are used or saved in between. Gradients are
            checked by their norm, so only with ``max_grad_norm``.

    Yields:
        ``(step, figures)``: the loss module's scalars, ``loss`` (the sum that was minimised) and, with a scheduler,
        ``lr``.

    Raises:
        NonFiniteError: a loss or a gradient is NaN or infinite; the message names the term and the step. On a CPU this
            comes before the optimiser's step, so the parameters are those of the step before. On a GPU, which is not
            waited for, it comes some steps late, and at the last step before it is yielded.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.training import adamw, train_steps
        >>> class Square(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.x = torch.nn.Parameter(torch.tensor(1.0))
        ...     def forward(self, batch):
        ...         return TensorDict(loss_square=(self.x - batch["target"]) ** 2)
        >>> module = Square()
        >>> batch = TensorDict(target=torch.tensor(0.0))
        >>> for step, figures in train_steps(module, lambda: batch, adamw(module, 0.1), steps=50):
        ...     pass
        >>> step, bool(figures["loss"] < 0.01)
        (50, True)
    """
    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}.")
    if autocast == torch.float16:
        raise ValueError("float16 would need its gradients scaled: use torch.bfloat16.")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    precision = _autocast(parameters[0].device.type, autocast)
    draw = batches if callable(batches) else _draw_from(batches)
    finite = FiniteCheck() if finite is None else finite
    for step in range(start + 1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        parts = []
        for _ in range(accumulate):
            with precision():
                losses = loss_module(draw())
                loss = total_loss(losses)
            (loss / accumulate).backward()
            parts.append(_figures(losses, loss))
        figures = parts[0] if accumulate == 1 else _mean(parts)
        if max_grad_norm is not None:
            figures[GRAD_NORM] = nn.utils.clip_grad_norm_(parameters, max_grad_norm).detach()
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


def _autocast(device: str, dtype: torch.dtype | None) -> Callable[[], AbstractContextManager[Any]]:
    return nullcontext if dtype is None else lambda: torch.autocast(device, dtype=dtype)


def _draw_from(batches: Iterable[TensorDictBase]) -> Callable[[], TensorDictBase]:
    def around() -> Iterator[TensorDictBase]:
        while True:
            count = 0
            for batch in batches:
                count += 1
                yield batch
            if not count:
                raise ValueError(
                    "The batches have run out: give a list or another iterable that can be gone through again, or a "
                    "function such as replay_buffer.sample."
                )

    return around().__next__


def _figures(losses: TensorDictBase, loss: Tensor) -> dict[str, Tensor]:
    scalars = {str(key): value.detach().reshape(()) for key, value in losses.items() if value.numel() == 1}
    return scalars | {"loss": loss.detach()}


def _mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([part[key].float() for part in parts]).mean() for key in parts[0]}
