"""Where a transform stands in an environment, however deep in chains of chains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrl.envs import Compose, Transform, TransformedEnv

__all__ = ["environment_of", "transforms_after", "transforms_before"]


def environment_of(transform: Transform) -> TransformedEnv | None:
    """The environment that a transform stands in; None in a replay buffer, or nowhere.

    Examples:
        >>> from torchrl.envs import Compose, PendulumEnv, RewardSum, StepCounter, TransformedEnv
        >>> from torchrl_lang.transforms.compose_utils import environment_of, transforms_before
        >>> inner = RewardSum()
        >>> env = TransformedEnv(PendulumEnv(), Compose(StepCounter(), Compose(inner)))
        >>> environment_of(inner) is env, [type(before).__name__ for before in transforms_before(inner)]
        (True, ['StepCounter'])
    """
    holder = _holder(transform)
    while isinstance(holder, Compose):
        holder = _holder(holder)
    return holder if isinstance(holder, TransformedEnv) else None


def transforms_before(transform: Transform) -> list[Transform]:
    """The transforms that an environment runs before this one, none of them a chain."""
    return _around(transform)[0]


def transforms_after(transform: Transform) -> list[Transform]:
    """The transforms that an environment runs after this one, none of them a chain."""
    return _around(transform)[1]


def _around(transform: Transform) -> tuple[list[Transform], list[Transform]]:
    before: list[Transform] = []
    after: list[Transform] = []
    inner, chain = transform, _holder(transform)
    while isinstance(chain, Compose):
        at = next(index for index, other in enumerate(chain.transforms) if other is inner)
        before = [*_links(chain.transforms[:at]), *before]
        after = [*after, *_links(chain.transforms[at + 1 :])]
        inner, chain = chain, _holder(chain)
    return before, after


def _holder(transform: Transform) -> Any:
    reference = transform.__dict__["_container"]
    return None if reference is None else reference()


def _links(transforms: Iterable[Transform]) -> list[Transform]:
    return [
        link
        for transform in transforms
        for link in (_links(transform.transforms) if isinstance(transform, Compose) else [transform])
    ]
