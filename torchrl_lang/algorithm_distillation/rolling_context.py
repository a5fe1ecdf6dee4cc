"""The rolling context of policies that read their own interactions, and the order of their calls."""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.schema import EPISODE_STEP


class RollingContext:
    """Up to ``C`` steps of each of ``N`` streams, left-aligned, of which the last one may lack its outcome.

    Args:
        entries: zeros for the entries of steps, ``[N, C, ...]``; ``episode_step`` is added.

    Attributes:
        steps: the entries, ``[N, C]``; what is not among the first ``length`` of a stream is left over.
        length: int64 ``[N]``: the number of steps with an outcome.
        clock: int64 ``[N]``: the number of the next step in its episode.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.rolling_context import RollingContext
        >>> context = RollingContext({"reward": torch.zeros(1, 4)})
        >>> for step in range(4):  # two episodes of two steps
        ...     context.write(reward=torch.tensor([step]))
        ...     context.close(torch.tensor([step % 2 == 1]))
        >>> context.evict((torch.arange(5) > 0)[None]), context.length
        (tensor([0]), tensor([2]))
        >>> context.steps["reward"][:, :2]
        tensor([[2., 3.]])
    """

    def __init__(self, entries: dict[str, Tensor]) -> None:
        shape = next(iter(entries.values())).shape[:2]
        self.steps = TensorDict(entries, batch_size=shape)
        device = next(iter(entries.values())).device
        self.steps[EPISODE_STEP] = torch.zeros(shape, dtype=torch.int64, device=device)
        self.length, self.clock = (torch.zeros(shape[0], dtype=torch.int64, device=device) for _ in range(2))
        self.row = torch.arange(shape[0], device=device)

    def write(self, **entries: Tensor) -> None:
        """Write entries ``[N, ...]`` of the step after the last one of each stream, in their order."""
        for key, value in {EPISODE_STEP: self.clock, **entries}.items():
            column = self.steps.get(key)
            column[self.row, self.length] = value.to(column)

    def close(self, done: Tensor) -> None:
        """Add the step that was written to each stream; ``done`` ``[N]`` ends its episode."""
        self.length = self.length + 1
        self.clock = torch.where(done.to(self.clock.device), 0, self.clock + 1)

    def evict(self, fits: Tensor) -> Tensor:
        """Drop the oldest episodes of each stream, as few as are needed for another step.

        Args:
            fits: bool ``[N, C + 1]``: whether there is room if a stream begins with each of its steps, or is empty.

        Returns:
            The streams that changed, int64 ``[R]``.

        Raises:
            ValueError: the running episode of a stream alone leaves no room.
        """
        if fits[:, 0].all():
            return self.row[:0]
        number, size = self.steps.get(EPISODE_STEP), self.steps.shape[1]
        begins = torch.cat([number, number[:, :1]], -1) == 0
        begins[self.row, self.length], begins[:, 0] = self.clock == 0, True
        allowed = begins & fits & (torch.arange(size + 1, device=fits.device) <= self.length[:, None])
        if len(full := (~allowed.any(-1)).nonzero()):
            raise ValueError(f"The episode of stream {int(full[0])} leaves no room in the context: lengthen it.")
        first = allowed.int().argmax(-1)
        changed = first.nonzero()[:, 0]
        index = (torch.arange(size, device=first.device) + first[changed, None]).clamp_max(size - 1)
        for column in self.steps.values():
            column[changed] = column[changed[:, None], index]
        self.length = self.length - first
        return changed


class StreamPolicy(nn.Module):
    """A :class:`~torchrl_lang.algorithm_distillation.ContextPolicy` with a :class:`RollingContext`.

    Its calls are ``begin``, perhaps ``prompt``, and then ``act`` and ``observe`` in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._context: RollingContext | None = None
        self._last_call = ""

    def _begin(self, context: RollingContext) -> None:
        self._context, self._last_call = context, "begin"

    def _after(self, *calls: str) -> RollingContext:
        """The contexts, if the last call was one of these."""
        if self._context is None or self._last_call not in calls:
            found, expected = self._last_call or "none", " or ".join(calls)
            raise RuntimeError(f"This call must follow {expected}, but the last call of the policy was {found}.")
        return self._context

    @torch.no_grad()
    def prompt(self, steps: TensorDictBase) -> None:
        """Begin each context with steps of a demonstration, ``[N, L]``; its next step is the first of an episode.

        Args:
            steps: steps in the entries of a :class:`~torchrl_lang.algorithm_distillation.LearningHistory`, such as rows
                of a window: none, a part of an episode, or several.

        Raises:
            RuntimeError: the last call was not ``begin``.
            ValueError: there are other streams, or the steps do not fit the context.
        """
        context = self._after("begin")
        if steps.ndim != 2 or len(steps) != len(context.length):
            raise ValueError(f"A prompt has shape [{len(context.length)}, L], got {list(steps.shape)}.")
        if steps.shape[1]:
            self._read_prompt(context, steps)
        self._last_call = "prompt"

    @abstractmethod
    def _read_prompt(self, context: RollingContext, steps: TensorDictBase) -> None:
        """Write steps ``[N, L]``, at least one of each stream."""
