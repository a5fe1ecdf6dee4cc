"""A model's run compiled with :func:`torch.compile`, once for each mode in which it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CompiledRuns", "is_compilable"]

Run = Callable[..., tuple[Tensor, ...]]


class CompiledRuns:
    """Compiles a run at its first call in each mode; a copy or pickle holds the options and compiles again.

    Args:
        options: those of :func:`torch.compile`.

    Examples:
        >>> import pickle, torch
        >>> from torchrl_lang.modules.compiled_runs import CompiledRuns
        >>> runs = CompiledRuns({"backend": "eager"})
        >>> runs.of(lambda tokens: (tokens + 1,), training=False, step=False, device="cpu")(torch.zeros(2))
        (tensor([1., 1.]),)
        >>> len(runs), len(pickle.loads(pickle.dumps(runs)))
        (1, 0)
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._of_mode: dict[tuple[bool, ...], Run] = {}

    def __len__(self) -> int:
        return len(self._of_mode)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_of_mode": {}}

    def of(self, run: Run, *, training: bool, step: bool, device: str) -> Run:
        """The compiled form of ``run`` for a mode: this model's ``training``, ``step`` of decoding, and torch's own.

        ``run`` is always the same function, on one type of device.
        """
        mode = (
            step,
            training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device),
        )
        if mode not in self._of_mode:

            def compiled(tokens: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
                return run(tokens, **kwargs)

            # Dynamo caches compiled code per code object, a few of each, and ignores hooks: each model and mode has its
            # own code object.
            compiled.__code__ = compiled.__code__.replace()
            self._of_mode[mode] = torch.compile(compiled, **self.options)
        return self._of_mode[mode]


def is_compilable(tokens: Tensor, options: dict[str, Any]) -> bool:
    """Whether a run is of whole rows or of one more token of each row, not of prompts that are added to a cache.

    The first token of rows has no positions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.compiled_runs import is_compilable
        >>> one, place = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[4], [7]])
        >>> is_compilable(one, {}), is_compilable(one, {"past_key_values": None, "position_ids": place})
        (True, True)
        >>> is_compilable(one, {"past_key_values": None, "position_ids": None})
        False
    """
    is_step = tokens.shape[-1] == 1 and options.get("position_ids") is not None
    return "past_key_values" not in options or is_step
