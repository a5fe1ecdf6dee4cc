"""One computation, wherever a transform can stand: in an environment, in a replay buffer, behind a collector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import Transform

__all__ = ["ActionTransform", "required", "set_spec"]


class ActionTransform(Transform):
    """A transform of what an action earned. Abstract: one fills in ``_compute`` and, for environments, ``_new_specs``.

    It reads the action's data (``root``) and writes beside the reward (``out``). In an environment and on steps, which
    have a ``"next"`` entry, that is ``"next"``; on rows and on flat data it is the data itself. Unlike TorchRL's
    transforms of observations it does the same in ``env.step`` and in ``forward``, so a transform tested on a batch
    is the one that runs in a replay buffer, as ``postproc`` of a collector, and in an environment.
    """

    def __init__(self, out_keys: Sequence[NestedKey]) -> None:
        super().__init__(in_keys=[], out_keys=list(out_keys))
        self.__dict__["_added"] = None

    @abstractmethod
    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        """Read the action's data from ``root``, and from ``out`` what came before; write into ``out``."""

    @abstractmethod
    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        """Specs of the entries that an environment gains by this."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a batch: steps with their ``"next"``, whole rows, or flat data. Written in place, and returned."""
        step = tensordict.get("next", None)
        self._compute(tensordict, tensordict if step is None else step)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._compute(tensordict, next_tensordict)
        return next_tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Environments come by _step and _reset; this is how a replay buffer extends with append_transform(invert=True).
        return self.forward(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """No action has been taken yet: zeros for all that this transform writes."""
        for key, spec in self._added_specs().items():
            tensordict_reset.set(key, spec.zero())
        return tensordict_reset

    def _added_specs(self) -> dict[NestedKey, TensorSpec]:
        if self.__dict__["_added"] is None:
            # The environment builds its specs, and with them ours, when they are first asked for.
            container = self.container
            if container is not None:
                container.observation_spec  # noqa: B018
        return self.__dict__["_added"] or {}

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Declare the new entries."""
        added = self._new_specs(observation_spec)
        self.__dict__["_added"] = {key: spec.clone() for key, spec in added.items()}
        for key, spec in added.items():
            set_spec(observation_spec, key, spec)
        return observation_spec

    def empty_cache(self) -> None:
        """Forget the environment's specs: it has changed."""
        self.__dict__["_added"] = None
        super().empty_cache()

    def clone(self) -> ActionTransform:
        """A copy without an environment; what it refers to, such as a frozen model, is shared."""
        other = super().clone()
        other.__dict__["_added"] = None
        return other

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} stands inside a worker of a SerialEnv or ParallelEnv, and TorchRL hands workers "
            "the action alone, without its log-probability. Put it over the batched environment: "
            "TransformedEnv(ParallelEnv(...), ...)."
        )


def required(name: str, key: NestedKey, advice: str, *sources: TensorDictBase) -> Tensor:
    """The entry ``key`` of the first source that has it, or an error that says what there is.

    Raises:
        KeyError: no source has it.
    """
    for source in sources:
        value: Any = source.get(key, None)
        if value is not None:
            return value
    present = sorted(map(str, sources[0].keys(True, True)))
    raise KeyError(f"{name} needs the entry {key!r}; there is {present}. {advice}")


def set_spec(specs: Composite, key: NestedKey, spec: TensorSpec) -> None:
    """Put a spec at a nested key, with composites on the way where there are none.

    Examples:
        >>> from torchrl.data import Composite, Unbounded
        >>> from torchrl_lang.transforms.placement import set_spec
        >>> specs = Composite(shape=(3,))
        >>> set_spec(specs, ("reference", "state"), Unbounded((3, 2)))
        >>> specs["reference", "state"].shape
        torch.Size([3, 2])
    """
    key = unravel_key(key)
    if isinstance(key, tuple):
        for depth in range(1, len(key)):
            if key[:depth] not in specs.keys(True):
                specs[key[:depth]] = Composite(shape=specs.shape, device=specs.device)
    specs[key] = spec
