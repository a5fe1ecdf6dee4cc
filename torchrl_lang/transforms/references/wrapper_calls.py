"""How TorchRL's wrappers of language models are run as a reference, and how what they return is read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn

__all__ = ["check_wrapper", "is_wrapper", "mask_by_name", "placed", "rows_of", "without_batching"]


def is_wrapper(module: object) -> bool:
    """Whether it is one of TorchRL's wrappers of language models, told by name: they need not be importable."""
    return any(base.__name__ == "LLMWrapperBase" for base in type(module).__mro__)


def check_wrapper(wrapper: Any) -> None:
    """Raise unless it can score tokens.

    Raises:
        TypeError: it is no wrapper.
        ValueError: it generates, reads a prompt, reads something else than tokens, or has no tokenizer.
    """
    if not is_wrapper(wrapper):
        raise TypeError(
            "A WrapperReference needs one of TorchRL's wrappers of language models (torchrl.modules.llm), got "
            f"{type(wrapper).__name__}."
        )
    if wrapper.generate:
        raise ValueError(
            "The wrapper generates, and a reference scores: build it with generate=False, e.g. "
            "wrapper.get_new_version(generate=False, input_key=('tokens', 'full'))."
        )
    if wrapper.input_mode != "tokens":
        raise ValueError(
            f"The wrapper reads {wrapper.input_mode!r}, and a reference scores the tokens that were taken: build it "
            "with input_mode='tokens'; rollouts of such a wrapper have them at ('tokens', 'full')."
        )
    key = unravel_key(wrapper.in_keys[0])
    if isinstance(key, tuple) and key[-1] == "prompt":
        raise ValueError(
            f"The wrapper scores {key!r}, which the agent did not write: build it with "
            f"input_key={(*key[:-1], 'full')!r}."
        )
    if isinstance(wrapper.model, nn.Module) and wrapper.tokenizer is None:
        raise ValueError("The wrapper has no tokenizer and cannot score without: build it with tokenizer=.")


def without_batching(wrapper: Any) -> Any:
    """The same wrapper without the lock by which threads share its calls, for a lock cannot be copied."""
    if not wrapper.batching:
        return wrapper
    plain = copy.copy(wrapper)
    plain._min_batch_size = plain._max_batch_size = plain._batching_lock = None
    plain._batch_queue, plain._futures = [], []
    return plain


def mask_by_name(model: Any) -> AbstractContextManager[Any]:
    """The context in which ``model(tokens, attention_mask)`` means what it says, whatever the model's order."""
    if not isinstance(model, nn.Module):
        return nullcontext()
    return _hooked(model)


@contextmanager
def _hooked(model: nn.Module) -> Iterator[None]:
    handle = model.register_forward_pre_hook(_name_mask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _name_mask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    names = inspect.signature(model.forward).parameters
    if len(args) != 2 or "attention_mask" not in names:
        return None
    tokens, mask = args
    positions = {"position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)} if "position_ids" in names else {}
    return (tokens,), {"attention_mask": mask, **positions, **kwargs}


def rows_of(out: TensorDictBase, key: NestedKey) -> list[Tensor]:
    """An entry as the list of its rows; empty where there is none."""
    value: Any = out.get(key, as_list=True)
    return [] if value is None or any(row is None for row in value) else list(value)


def placed(rows: list[Tensor], mask: Tensor) -> Tensor:
    """Rows, each with or without its padding, at the real tokens of ``mask`` ``[B, T]``; zero elsewhere."""
    if all(len(row) == mask.shape[-1] for row in rows):
        return torch.where(mask, torch.stack(rows), 0)
    lengths = mask.sum(-1).tolist()
    if [len(row) for row in rows] != lengths:
        raise ValueError(
            f"The wrapper returned rows of {[len(row) for row in rows][:3]}, ... tokens, and the data's attention mask "
            f"counts {lengths[:3]}, ...: both must speak of the same tokens."
        )
    flat = torch.cat(rows)
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
