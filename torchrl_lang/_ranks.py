"""The processes of a training run that ``torchrun`` has started: which one this is, and what they compute together.

In a single process, and outside of :func:`joined`, nothing here communicates and every function returns its argument.
All processes must call what communicates equally often and in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

T = TypeVar("T")

_WAIT = timedelta(hours=6)
"""Others may wait this long for what the first process does alone, such as games; a process that dies is noticed."""
_BUCKET = 2**24
"""Numbers of gradients that are summed at a time."""
_OTHER_SEED = 1_000_003

_place = (0, 1)
_store: Any = None
_claimed: bool | None = None
_shares_batch = False


def rank() -> int:
    """The number of this process."""
    return _place[0]


def size() -> int:
    """The number of processes."""
    return _place[1]


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return rank() == 0


def own_seed(seed: int) -> int:
    """Another seed in each process; in the first one ``seed`` itself."""
    return seed + _OTHER_SEED * rank()


# -- sums and objects --------------------------------------------------------------------------------------------------


@contextmanager
def shared_batch() -> Iterator[None]:
    """Within, a loss computes its terms on this process's share of a batch, see :func:`total`."""
    global _shares_batch
    before, _shares_batch = _shares_batch, size() > 1
    try:
        yield
    finally:
        _shares_batch = before


def shares_batch() -> bool:
    """Whether this process has only a share of the batch."""
    return _shares_batch


def total(value: Tensor) -> Tensor:
    """The sum over the processes of a number of each one's share of a batch, without gradients."""
    if not _shares_batch:
        return value
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def mean_figures(figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The means over the processes of one-element tensors."""
    if size() == 1 or not figures:
        return dict(figures)
    stacked = torch.stack([value.double().reshape(()) for value in figures.values()])
    dist.all_reduce(stacked)
    means = (stacked / size()).unbind()
    return {key: mean.to(torch.float32) for key, mean in zip(figures, means, strict=True)}


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace the gradients of parameters, in place, with their means over the processes.

    A parameter that has a gradient in one process gets one in all. Those of sharded parameters are means already.
    """
    every = [p for p in parameters if not isinstance(p, DTensor)]
    if size() == 1 or not every:
        return
    has = torch.tensor([p.grad is not None for p in every], dtype=torch.uint8, device=every[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    bucket: list[Tensor] = []
    for p, found in zip(every, has.tolist(), strict=True):
        if not found:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if bucket and (bucket[0].dtype != p.grad.dtype or sum(g.numel() for g in bucket) + p.numel() > _BUCKET):
            _average(bucket)
            bucket = []
        bucket.append(p.grad)
    _average(bucket)


def _average(tensors: list[Tensor]) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def equal(module: nn.Module) -> None:
    """Give all processes the weights of a module in the first one, but other random numbers from now on."""
    if size() > 1:
        for value in {id(value): value for value in module.state_dict().values()}.values():
            dist.broadcast(value, 0)
    if not is_first():
        torch.manual_seed(own_seed(torch.initial_seed()))


def gather(item: T) -> list[T]:
    """Collect the items of all processes, in their order; tensors must be on the CPU."""
    if size() == 1:
        return [item]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, item)
    return found


def from_first(function: Callable[[], T]) -> T:
    """Call a function in the first process, for which the others wait; all get its result."""
    if size() == 1:
        return function()
    found: list[Any] = [function() if is_first() else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


def wait() -> None:
    """Wait until all processes have come here."""
    any_of(False)


def any_of(flag: bool) -> bool:
    """Whether a flag is set in one of the processes."""
    if size() == 1:
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


class PerRank:
    """The state of something that each process has its own of, as a part of a checkpoint, which has those of all.

    Args:
        part: has a state; nothing else has its random numbers, games, ....
        reset: loads the first process's state where another number of processes saved the states; by default each
            process beyond those loads nothing.
    """

    def __init__(self, part: Any, reset: Callable[[Any], None] | None = None) -> None:
        self.part, self.reset = part, reset

    def state_dict(self) -> Any:
        """The state itself in a single process, else those of all, by their numbers."""
        states = gather(self.part.state_dict())
        return states[0] if size() == 1 else {"of_ranks": states}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load this process's state."""
        states = state_dict.get("of_ranks", [state_dict])
        if len(states) != size() and self.reset is not None:
            self.reset(states[0])
        elif rank() < len(states):
            self.part.load_state_dict(states[rank()])


# -- beginning and end -------------------------------------------------------------------------------------------------


def started() -> bool:
    """Whether ``torchrun``, or what sets its variables, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def reports() -> bool:
    """Whether this process is to report why it ends: the first process or, while they are joined, the first to ask."""
    global _claimed
    if _claimed is not None:
        found, _claimed = _claimed, None
        return found
    if _store is None:
        return not started() or os.environ["RANK"] == "0"
    try:
        return bool(_store.add("torchrl_lang/ended", 1) == 1)
    except RuntimeError:  # what held the store has ended as well
        return True


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Within, the processes that ``torchrun`` has started work together, and only the first one prints.

    Args:
        device: what they compute on; ``cuda`` is another GPU in each process of a machine.

    Raises:
        ValueError: there are fewer GPUs than processes, or one of them was chosen for all.
        ConnectionError: another process has ended while this one waited for it.
    """
    global _place, _store, _claimed
    if not started() or size() > 1:
        yield
        return
    if device.type == "cuda":
        _check_gpu(device)
    from torch.distributed.rendezvous import rendezvous

    _store, *place = next(rendezvous("env://", timeout=_WAIT))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=_store, rank=place[0], world_size=place[1], timeout=_WAIT)
    _place = (place[0], place[1])
    try:
        with _quiet(not is_first()):
            yield
            wait()
    except BaseException as error:
        _claimed = reports()  # before the others notice: the line is that of the first one that ended
        if not (isinstance(error, RuntimeError) and _is_of_peers(error)):
            raise
        lost = "another process of this run has ended, and so this one does"
        raise ConnectionError(f"{lost}; the same command continues from the last checkpoint.") from error
    finally:
        _place = (0, 1)
        dist.destroy_process_group()


def choose_gpu() -> None:
    """Let ``cuda`` be the GPU of this process, if the machine has one for it."""
    own = int(os.environ.get("LOCAL_RANK", 0))
    if own < torch.cuda.device_count():
        torch.cuda.set_device(own)


def _check_gpu(device: torch.device) -> None:
    own, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if device.index is not None:
        raise ValueError(f"--device {device} is one GPU, and each process takes its own: give --device cuda.")
    if own >= found:
        raise ValueError(f"Process {own} of this machine has no GPU, there are {found}: start {found} processes on it.")


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


def _is_of_peers(error: RuntimeError) -> bool:
    """Whether an error of torch's is that another process cannot be reached."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
