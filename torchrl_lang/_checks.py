"""Checks of options whose errors give the value and the expected range."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

Count = Annotated[int, 1]  # an integer of at least 1
Unit = Annotated[float, "[0, 1]"]
Positive = Annotated[float, "(0, inf)"]
NonNegative = Annotated[float, "[0, inf)"]
Finite = Annotated[float, "(-inf, inf)"]
Function = TypeVar("Function", bound=Callable[..., Any])


def check_options(**options: tuple[object, str | int | Collection[object]]) -> None:
    """Raise ValueError unless all options have an allowed value, given beside it.

    A text is an interval of finite numbers, an integer the least of integers, and a collection has all allowed values.

    Examples:
        >>> from torchrl_lang._checks import check_options
        >>> check_options(gamma=(0.9, "[0, 1]"), weight=(0.0, "[0, inf)"), heads=(2, 1), target=("td", ("td", "mc")))
        >>> check_options(expectile=(1.0, "(0, 1)"))
        Traceback (most recent call last):
            ...
        ValueError: expectile must lie in (0, 1), got 1.0.
    """
    for name, (value, allowed) in options.items():
        if isinstance(allowed, str):
            good, expected = _lies_in(value, allowed), f"lie in {allowed}"
        elif isinstance(allowed, int):
            good, expected = _at_least(value, allowed), f"be an integer of at least {allowed}"
        else:
            # An array is compared element by element.
            good = not getattr(value, "shape", ()) and value in allowed
            expected = f"be one of {list(allowed)}"
        if not good:
            raise ValueError(f"{name} must {expected}, got {value!r}.")


def check_given(**options: tuple[object, str | int | Collection[object]]) -> None:
    """As :func:`check_options`, for options that may be None."""
    check_options(**{name: (value, allowed) for name, (value, allowed) in options.items() if value is not None})


def checked(function: Function) -> Function:
    """Raise ValueError for arguments that their declared types do not allow: a Literal, or a type such as ``Count``.

    What stands behind the type in Annotated is what :func:`check_options` reads; ``| None`` allows None as well. Of a
    dataclass the fields are checked.

    Examples:
        >>> from torchrl_lang._checks import Count, Unit, checked
        >>> @checked
        ... def mean_return(episodes: Count, gamma: Unit | None = None): ...
        >>> mean_return(2)
        >>> mean_return(0)
        Traceback (most recent call last):
            ...
        ValueError: episodes must be an integer of at least 1, got 0.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    names = [*inspect.signature(function).parameters]

    @functools.cache
    def rules() -> list[tuple[str, Any, bool]]:
        known = _Names(vars(builtins) | function.__globals__)
        hints = get_type_hints(function, {}, known, include_extras=True)
        return [(name, *rule) for name, hint in hints.items() for rule in _declared(hint)]

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, allowed, or_none in rules():
            if name in given and not (or_none and given[name] is None):
                check_options(**{name: (given[name], allowed)})
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class _Names(dict[str, Any]):
    """The names of a module; those that it imports for types only stand for any type."""

    def __missing__(self, name: str) -> Any:
        return Any


def _declared(hint: Any) -> Iterator[tuple[Any, bool]]:
    """Give what a type allows, and whether None as well; nothing where it is no such type."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part for part in parts if part is not NoneType]
    if len(kinds) == 1 and get_origin(kinds[0]) in (Annotated, Literal):
        allowed = getattr(kinds[0], "__metadata__", [get_args(kinds[0])])[0]
        yield allowed, len(kinds) < len(parts)


def _lies_in(value: object, interval: str) -> bool:
    """Whether a finite number lies in an interval such as ``(0, 1]``."""
    if isinstance(value, str | bytes):  # float() would read them
        return False
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = number > low if interval[0] == "(" else number >= low
    return math.isfinite(number) and above and (number < high if interval[-1] == ")" else number <= high)


def _at_least(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:  # also of tensors and arrays that hold no integer
        return False


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError unless the hidden size of a model can be shared out to its attention heads."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}.")


def have_shapes(*expected: tuple[str, Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each named tensor that is given has the shape beside it."""
    for name, given, shape in expected:
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}.")


@contextmanager
def needs_extra(what: str, extra: str, other: str = "") -> Iterator[None]:
    """Names the extra to install where an import in the block fails.

    Examples:
        >>> from torchrl_lang._checks import needs_extra
        >>> with needs_extra("OpenEnvGame", "openenv"):
        ...     raise ImportError("No module named 'websockets'")
        Traceback (most recent call last):
            ...
        ImportError: OpenEnvGame needs an extra: pip install 'torchrl-lang[openenv]'.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs an extra: pip install 'torchrl-lang[{extra}]'{other}.") from error


def torchrl_names(**names: str) -> Callable[[Callable[..., None]], Any]:
    """Let a method take arguments by the names that TorchRL's class of the same name has for them.

    The TypeError for an argument that it has not names the page on those that only TorchRL's class has.

    Args:
        **names: the argument that each name of TorchRL's stands for.
    """

    def decorate(method: Callable[..., None]) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            name = type(self).__name__
            for theirs in names.keys() & kwargs.keys():
                if (ours := names[theirs]) in kwargs:
                    raise TypeError(f"{theirs} is TorchRL's name of {ours}: give {name} one of them.")
                kwargs[ours] = kwargs.pop(theirs)
            try:
                method(self, *args, **kwargs)
            except TypeError as error:
                unknown = [key for key in kwargs if f"unexpected keyword argument {key!r}" in str(error)]
                if not unknown:
                    raise
                where = "the table of arguments in docs/coming_from/torchrl_llm.md has what to write for it"
                message = f"{name} has no argument {unknown[0]!r}. If it is one of TorchRL's {name}, {where}."
                raise TypeError(message) from error

        return wrapper

    return decorate


def other_name(name: str) -> Any:
    """The attribute ``name`` of a class, read and set by the name that TorchRL's class of the same name has for it."""
    doc = f"TorchRL's name of ``{name}``."
    return property(operator.attrgetter(name), lambda self, value: setattr(self, name, value), doc=doc)


def is_wrapper(module: object) -> bool:
    """Whether it is one of TorchRL's language-model wrappers, recognized by name: importing them is optional."""
    return any(base.__name__ == "LLMWrapperBase" for base in type(module).__mro__)


def _refuse_tokenizer(actor: object) -> Any:
    """Refused with a TypeError: TorchRL's losses that ask for one, SFTLoss and DistillationLoss, read chats."""
    advice = "give it a wrapper and the steps of chat_from_rows(rows), or use BCLoss on rows"
    raise TypeError(f"A loss that asks for a tokenizer reads chats, and {type(actor).__name__} reads rows: {advice}.")


no_tokenizer: Any = property(_refuse_tokenizer)
"""The ``tokenizer`` of actors that read rows."""


def is_history(value: object) -> bool:
    """Whether it is a conversation of TorchRL's LLM stack, recognized by name like a wrapper."""
    return type(value).__name__ == "History"


def refuse_wrapper(module: object) -> None:
    """Raise TypeError for one of TorchRL's wrappers, where losses and environments take a part that reads rows."""
    if is_wrapper(module):
        instead = "train language_actor(wrapper.model), act with modules.WrapperActor(wrapper, control, action_length)"
        raise TypeError(f"A {type(module).__name__} reads and writes conversations of TorchRL, not rows: {instead}.")
