"""Models whose weights :func:`torch.distributed.fsdp.fully_shard` (FSDP2) has sharded over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

T = TypeVar("T")

_CALL = "_torchrl_lang_call"
_gathered: WeakSet[nn.Module] = WeakSet()

_ADVICE = (
    "Apply fully_shard to the blocks and then to the language model itself, fully_shard(lm), without "
    "reshard_after_forward=True there, and build the actor from that model: language_actor(lm)."
)


def refuse_untied(headless: Any) -> None:
    """Raise RuntimeError if a model was sharded without its head although both share a weight."""
    if headless.config.tie_word_embeddings:
        raise RuntimeError(f"The head is tied to the embedding, which was sharded without it. {_ADVICE}")


def run_through(root: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that runs parts of a sharded model as if it were the model's own forward.

    Weights that belong to no block are gathered before, and stay gathered for heads that read the states afterwards; a
    RuntimeError if the head's weight is sharded again after the call.
    """
    if root in _gathered:
        return function(*args, **kwargs)
    if not hasattr(root, _CALL):
        setattr(root, _CALL, MethodType(_call, root))
        register_fsdp_forward_method(root, _CALL)
    result = getattr(root, _CALL)(function, *args, **kwargs)
    find_head: Any = getattr(root, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    if head is not None and not isinstance(head, FSDPModule) and isinstance(head.weight, DTensor):
        raise RuntimeError(f"The language-model head is sharded again before it is read. {_ADVICE}")
    return result


def _call(root: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(*args, **kwargs)


def whole_weight(module: Any) -> Tensor:
    """The weight of a module; a RuntimeError if it is sharded and has not been gathered."""
    weight: Tensor = module.weight
    if isinstance(weight, DTensor):
        raise RuntimeError(f"The weight of {type(module).__name__} is sharded and has not been gathered. {_ADVICE}")
    return weight


def refuse_sharded(module: nn.Module, what: str) -> None:
    """Raise ValueError if weights of ``module`` are sharded."""
    parts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if parts or any(isinstance(child, FSDPModule) for child in module.modules()):
        raise ValueError(f"Sharded weights cannot be {what}: do so before fully_shard, or load a second model.")


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gather all weights of sharded modules inside a ``with`` block, without gradients or further communication.

    All processes must enter the block equally often; inside it each may run its modules any number of times.
    """
    found: Any = dict.fromkeys(part for module in modules for part in module.modules() if isinstance(part, FSDPModule))
    parts = [part for part in found if part not in _gathered]
    for part in parts:
        part.unshard()
    hooks = [(table, dict(table)) for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    try:
        for table, before in hooks:  # these hooks would shard each block again after its forward
            for key, hook in before.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del table[key]
        _gathered.update(parts)
        yield
    finally:
        for table, before in hooks:
            table.clear()
            table.update(before)
        for part in parts:
            _gathered.discard(part)
            part.reshard()
