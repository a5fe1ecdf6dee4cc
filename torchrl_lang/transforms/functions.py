"""Models that a function refers to without having them as submodules: neither a copy nor a fingerprint sees them."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["model_behind", "refuse_unregistered"]

_FUNCTIONS = (FunctionType, MethodType, partial)
_LEADING = (nn.Module, *_FUNCTIONS, list, tuple, dict)


def model_behind(function: Callable[..., Any]) -> nn.Module | None:
    """The first module with trainable parameters that a function, a method or a partial refers to; None without any.

    Looked through are closures, globals that the code reads, defaults, what a method is bound to, and what a partial
    holds, each also where it is a function in turn, or stands in a list, tuple or dict. Attributes of other objects
    and of Python modules are not.

    Examples:
        >>> import torch
        >>> from torchrl_lang.transforms.functions import model_behind
        >>> net = torch.nn.Linear(3, 1)
        >>> model_behind(lambda x: net(x)) is net, model_behind(net.forward) is net
        (True, True)
        >>> model_behind(lambda x: x + 1), model_behind(net.requires_grad_(False).forward)
        (None, None)
    """
    start = [function] if isinstance(function, _LEADING) else []
    return next((held for held, _ in _models(start) if _trains(held)), None)


def refuse_unregistered(actor: nn.Module, *, copied: bool) -> None:
    """Raise where a function in ``actor`` reaches a model that trains, and that would follow the policy unnoticed.

    Args:
        actor: looked through are the attributes of all its modules.
        copied: whether the actor is to be copied. A copied method is bound to the copy, and a copied partial holds
            copies; any other function goes on referring to the original, even to one that is registered.

    Raises:
        ValueError: there is one.
    """
    registered = {id(parameter) for parameter in actor.parameters()}
    values = [value for module in actor.modules() for value in _attributes(module)]
    for function in (value for value in values if isinstance(value, _FUNCTIONS)):
        for held, stays in _models(function):
            unknown = any(p.requires_grad and id(p) not in registered for p in held.parameters())
            if unknown or (copied and stays and _trains(held)):
                raise ValueError(
                    f"A function in {type(actor).__name__} refers to a {type(held).__name__} that trains, which a copy "
                    "would share, or a fingerprint not see: make it a module that holds the model (class "
                    "...(nn.Module) with forward)."
                )


def _attributes(module: nn.Module) -> list[Any]:
    """All but the functions that torch.compile leaves there: they refer to the module, and a copy makes its own."""
    if "_orig_mod" in module._modules:
        return []
    return [value for name, value in vars(module).items() if name != "_compiled_call_impl"]


def _models(start: Any) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that a value leads to, nearest first, and whether a deep copy of it still leads to the very same ones."""
    ahead, seen = deque([(start, False)]), set()
    while ahead:
        value, stays = ahead.popleft()
        if (id(value), stays) in seen:
            continue
        seen.add((id(value), stays))
        if isinstance(value, nn.Module):
            yield value, stays
        else:
            stays = stays or isinstance(value, FunctionType)
            ahead.extend((part, stays) for part in _held(value) if isinstance(part, _LEADING))


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        named = [value.__globals__[name] for name in _globals(value.__code__) if name in value.__globals__]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *named]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return value.values() if isinstance(value, dict) else value


def _globals(code: CodeType) -> set[str]:
    """Names of the globals that a function's code reads, inner functions' included; attributes are none."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False
    return True


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
