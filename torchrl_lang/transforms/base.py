"""One computation, wherever a transform can stand: in an environment, in a replay buffer, behind a collector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import Transform, TransformedEnv

from torchrl_lang.transforms.compose_utils import environment_of, transforms_after, transforms_before
from torchrl_lang.transforms.keys import key_list

__all__ = ["ActionTransform", "required", "set_spec"]

_STEP = "_step"  # TorchRL's mask of the rows that are to be stepped
_NOT_KNOWN: dict[str, Any] = {"_added": None, "_acted": None, "_inverts": None, "_found": None}


class ActionTransform(Transform):
    """A transform of what an action earned. Abstract: one fills in ``_compute`` and, for environments, ``_new_specs``.

    It reads the action's data (``root``) and writes beside the reward (``out``). In an environment and on steps, which
    have a ``"next"`` entry, that is ``"next"``; on rows and on flat data it is the data itself. Unlike TorchRL's
    transforms of observations it does the same in ``env.step`` and in ``forward``, so a transform tested on a batch
    is the one that runs in a replay buffer, as ``postproc`` of a collector, and in an environment.

    In an environment it sees actions and observations as the policy does at this place of the chain: transforms of
    actions go before it. One that stands behind it, and would change the action before it gets here, raises a
    ``ValueError`` when the environment builds its specs.
    """

    def __init__(self, out_keys: Sequence[NestedKey]) -> None:
        super().__init__(in_keys=[], out_keys=list(out_keys))
        self.__dict__.update(_NOT_KNOWN)

    @abstractmethod
    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        """Read the action's data from ``root``, and from ``out`` what came before; write into ``out``."""

    @abstractmethod
    def _new_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        """Specs of the entries that an environment gains by this."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a batch: steps with their ``"next"``, whole rows, or flat data.

        Returns:
            A tensordict with what was written; the one given stays as it was, for collectors use theirs again.
        """
        out = tensordict.copy()
        step = out.get("next", None)
        self._compute(out, out if step is None else step)
        return out

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._inverted_before() and (keys := self._acted_keys()):
            # Transforms before this one are about to turn the action into what the base environment takes.
            self._acted = tensordict.select(*keys, _STEP, strict=False)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        acted, self._acted = self._acted, None
        if acted is not None:
            tensordict = _as_acted(tensordict, acted)
        self._compute(tensordict, next_tensordict)
        return next_tensordict

    def _acted_keys(self) -> list[NestedKey]:
        """Entries that are needed as the policy read and wrote them."""
        return []

    def _action_keys(self) -> list[NestedKey]:
        """The actions among them."""
        return []

    def _refuse_actions_changed(self) -> None:
        for other in [] if environment_of(self) is None else transforms_after(self):
            named = key_list([*(other.in_keys_inv or ()), *(other.out_keys_inv or ())])
            changed = [key for key in self._action_keys() if key in named]
            if changed:
                raise ValueError(
                    f"{type(other).__name__} changes the action {changed[0]!r} on its way to the environment, and "
                    f"stands behind {type(self).__name__}, which must see it as the policy wrote it: put it before."
                )

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Environments come by _step and _reset; this is how a replay buffer extends with append_transform(invert=True).
        return self.forward(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """No action has been taken yet: zeros for all that this transform writes."""
        for key, spec in self._added_specs().items():
            # An environment that is not locked takes more batch dimensions than its specs have.
            batch = tensordict_reset.batch_size
            tensordict_reset.set(key, spec.zero(batch[: len(batch) - len(self.parent.batch_size)]))
        return tensordict_reset

    def _inverted_before(self) -> bool:
        """Whether it stands in an environment, behind transforms that change what the policy wrote."""
        if self.__dict__["_inverts"] is None:
            others = [] if environment_of(self) is None else transforms_before(self)
            self.__dict__["_inverts"] = any(_inverts(other) for other in others)
        return self.__dict__["_inverts"]

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """An environment that resets itself: zeros on the rows whose episode ended."""
        masks = [tensordict.get(key) for key in self.parent.reset_keys]
        batch = tensordict_reset.batch_size
        ended = torch.stack([mask.reshape(*batch, -1).any(-1) for mask in masks]).any(0)
        for key in self._added_specs():
            value = tensordict_reset.get(key)
            tensordict_reset.set(key, value.masked_fill(expand_as_right(ended, value), 0))
        return tensordict_reset

    def _added_specs(self) -> dict[NestedKey, TensorSpec]:
        if self.__dict__["_added"] is None:
            # The environment builds its specs, and with them ours, when they are first asked for.
            environment = environment_of(self)
            if environment is not None:
                environment.observation_spec  # noqa: B018
        return self.__dict__["_added"] or {}

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        """Declare the new entries."""
        self._refuse_actions_changed()
        self._inverted_before()  # looked up here, so that a compiled step need not
        added = self._new_specs(observation_spec)
        self.__dict__["_added"] = {key: spec.clone() for key, spec in added.items()}
        for key, spec in added.items():
            set_spec(observation_spec, key, spec)
        return observation_spec

    @property
    def parent(self) -> Any:
        """The environment as it is at this place; however deep in chains of chains, where TorchRL's own gets lost."""
        environment = environment_of(self)
        if self.__dict__.get("_parent") is None and environment is not None:
            parent = TransformedEnv(environment.base_env, auto_unwrap=False)
            for transform in transforms_before(self):
                parent.append_transform(transform.clone())
            self.__dict__["_parent"] = parent
        return self.__dict__.get("_parent")

    def set_container(self, container: Any) -> None:
        """Stand in an environment, a chain or a replay buffer."""
        self.__dict__.update(_NOT_KNOWN)
        super().set_container(container)

    def empty_cache(self) -> None:
        """Forget the environment's specs: it has changed."""
        self.__dict__.update(_NOT_KNOWN)
        super().empty_cache()

    def clone(self) -> ActionTransform:
        """A copy without an environment; what it refers to, such as a frozen model, is shared."""
        other = super().clone()
        other.__dict__.update(_NOT_KNOWN)
        return other

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} stands inside a worker of a SerialEnv or ParallelEnv, and TorchRL hands workers "
            "the action alone, without its log-probability. Put it over the batched environment: "
            "TransformedEnv(ParallelEnv(...), ...)."
        )


def _inverts(transform: Transform) -> bool:
    own = not isinstance(transform, ActionTransform) and type(transform)._inv_call is not Transform._inv_call
    return own or bool(transform.in_keys_inv)


def _as_acted(tensordict: TensorDictBase, acted: TensorDictBase) -> TensorDictBase:
    """What the base environment was given, with entries as the policy read and wrote them."""
    if acted.batch_size != tensordict.batch_size:  # only some of the rows are stepped
        acted = acted[acted[_STEP].view(acted.batch_size)]
    changed = [key for key, value in acted.items(True, True) if tensordict.get(key, None) is not value]
    return tensordict.copy().update(acted.select(*changed)) if changed else tensordict


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
        >>> from torchrl_lang.transforms.base import set_spec
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
