"""A random generator that belongs to a policy and can be sent to other processes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RandomStream(nn.Module):
    """Uniform numbers from its own generator. It is a module, so that evaluation and seeding find it in a policy.

    A copy or pickle continues with the same numbers if a seed or a generator was given; otherwise it takes a new seed
    from the operating system.

    Args:
        seed: seed of the generator.
        generator: a generator on any device, instead of ``seed``.

    Raises:
        ValueError: both are given.

    Examples:
        >>> import copy, torch
        >>> from torchrl_lang._random_stream import RandomStream
        >>> stream = RandomStream(0)
        >>> other = copy.deepcopy(stream)
        >>> torch.equal(stream.uniform((3,)), other.uniform((3,)))
        True
    """

    def __init__(self, seed: int | None = None, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if seed is not None and generator is not None:
            raise ValueError("Give either seed or generator, not both.")
        self.is_seeded = seed is not None or generator is not None
        self.generator = _generator(seed) if generator is None else generator

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        """Uniform numbers in ``[0, 1)``, on the generator's device: the CPU unless another generator was given."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device, dtype=dtype)

    def below(self, n: Tensor) -> Tensor:
        """A uniform integer in ``[0, n)`` for each entry of ``n``, int64; 0 if ``n`` is 0."""
        return torch.minimum((self.uniform(tuple(n.shape)).to(n.device) * n).long(), (n - 1).clamp_min(0))

    def choice(self, allowed: Tensor, rows: Tensor | None = None) -> Tensor:
        """The index of a True entry in each row of ``allowed``, bool ``[N, A]``; each is equally likely.

        Args:
            allowed: the entries to choose from.
            rows: bool ``[N]``, rows that are wanted. The others cost random numbers, but no search.

        Returns:
            int64 ``[N]``, or one for each wanted row; ``A`` where a row has no True entry.

        Examples:
            >>> import torch
            >>> from torchrl_lang._random_stream import RandomStream
            >>> RandomStream(0).choice(torch.tensor([[False, True, False], [False, False, True]]))
            tensor([1, 2])
        """
        rank = self.below(allowed.sum(-1))
        if rows is not None:
            allowed, rank = allowed[rows], rank[rows]
        return (allowed.cumsum(-1) <= rank[:, None]).sum(-1)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        generator = state.pop("generator")
        # As bytes: a tensor would be sent to another process in shared memory that may be freed before it arrives.
        drawn = (str(generator.device), generator.get_state().numpy().tobytes()) if self.is_seeded else None
        return {**state, "drawn": drawn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        drawn = state.pop("drawn")
        super().__setstate__(state)
        if drawn is None:
            self.generator = _generator(None)
        else:
            self.generator = torch.Generator(drawn[0])
            self.generator.set_state(torch.frombuffer(bytearray(drawn[1]), dtype=torch.uint8))


def generators(policy: Any) -> list[torch.Generator]:
    """All generators that a policy or one of its modules has as attributes, each once and in a fixed order.

    Args:
        policy: a module, or any object. Generators in closures are not found.
    """
    holders = policy.modules() if isinstance(policy, nn.Module) else [policy]
    attributes = [value for holder in holders for value in getattr(holder, "__dict__", {}).values()]
    return list({id(value): value for value in attributes if isinstance(value, torch.Generator)}.values())


@contextmanager
def seeded_generators(seed: int, *policies: Any) -> Iterator[None]:
    """Seed torch's global generators and those of policies inside a ``with`` block, and restore them afterwards.

    Args:
        seed: the generators get different seeds computed from it, so that none copies another.
        *policies: modules or objects; see :func:`generators` for what is found.

    Examples:
        >>> from torchrl_lang._random_stream import RandomStream, seeded_generators
        >>> stream, draws = RandomStream(), []
        >>> for _ in range(2):
        ...     with seeded_generators(3, stream):
        ...         draws.append(stream.uniform((1,)).item())
        >>> draws[0] == draws[1]
        True
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    streams = list({id(stream): stream for policy in policies for stream in generators(policy)}.values())
    states = [stream.get_state() for stream in streams]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        for index, stream in enumerate(streams):
            stream.manual_seed(seed + index + 1)
        try:
            yield
        finally:
            for stream, state in zip(streams, states, strict=True):
                stream.set_state(state)


def _generator(seed: int | None) -> torch.Generator:
    return torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
