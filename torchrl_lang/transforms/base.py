"""The base of the KL transforms: the same computation in an environment, a replay buffer and a collector's postproc."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack, unravel_key
from tensordict.utils import expand_as_right
from torchrl.data import Composite, TensorSpec
from torchrl.envs import Compose, Transform

from torchrl_lang.schema import ACTION, AGENT_MASK, REWARD, TOKEN_LOG_PROB, TOKEN_REWARD, TOKENS

REF_LOG_PROB = "ref_log_prob"
KL = "kl"
_STEP = "_step"  # TorchRL's mask of the rows to step


@dataclass(frozen=True)
class ActionKeys:
    """Keys of an action, its log-probability under the policy that chose it, its reward, and the mask of its tokens.

    Examples:
        >>> from torchrl_lang.transforms.base import ActionKeys
        >>> ActionKeys.of_action(("agents", "action")).kl, ActionKeys.row().mask
        (('agents', 'kl'), 'agent_mask')
    """

    action: tuple[NestedKey, ...]
    """The action; several for a composite action."""
    log_prob: tuple[NestedKey, ...]
    """Its log-probability under the policy; several are summed."""
    reward: NestedKey
    ref_log_prob: NestedKey = REF_LOG_PROB
    kl: NestedKey = KL
    mask: NestedKey | None = None
    """bool, the shape of the log-probability: True on the tokens that count; None where all do."""

    @classmethod
    def of_action(
        cls, action: NestedKey | Sequence[NestedKey] = ACTION, log_prob: NestedKey | Sequence[NestedKey] | None = None
    ) -> ActionKeys:
        """One action a step, in TorchRL's names; the keys of a nested action are in its group."""
        actions = key_list(action)
        group = actions[0][:-1] if isinstance(actions[0], tuple) and len(actions) == 1 else ()
        own = [sibling(key, f"{last_name(key)}_log_prob") for key in actions]
        log_probs = own if log_prob is None else key_list(log_prob)
        reward, ref, kl = (unravel_key((*group, name)) for name in (REWARD, REF_LOG_PROB, KL))
        return cls(tuple(actions), tuple(log_probs), reward, ref, kl)

    @classmethod
    def utterance(cls) -> ActionKeys:
        """One utterance a step, its log-probability token by token, ``[*B, K]``."""
        return cls((ACTION,), (TOKEN_LOG_PROB,), REWARD)

    @classmethod
    def row(cls) -> ActionKeys:
        """A whole episode as one row of tokens, everything ``[*B, T]``."""
        return cls((TOKENS,), (TOKEN_LOG_PROB,), TOKEN_REWARD, mask=AGENT_MASK)


def key_list(keys: NestedKey | Sequence[NestedKey]) -> list[NestedKey]:
    """One key (a string or a nested tuple) or several as a list."""
    return [unravel_key(key) for key in ([keys] if isinstance(keys, (str, tuple)) else keys)]


def last_name(key: NestedKey) -> str:
    """The name of an entry within its group."""
    return key[-1] if isinstance(key, tuple) else key


def sibling(key: NestedKey, name: str) -> NestedKey:
    """The entry ``name`` in the group of ``key``."""
    return unravel_key((*key[:-1], name)) if isinstance(key, tuple) else name


class ActionTransform(Transform):
    """Computes entries of the action that was taken. Abstract: a subclass implements ``_compute`` and ``_new_specs``.

    It reads the action's data (``root``) and writes beside the reward (``out``): into ``"next"`` in an environment and
    on steps, into the data itself on rows and flat data. ``env.step`` and ``forward`` do the same.

    In an environment it needs the action as the policy wrote it, so transforms of actions go before it in the chain;
    one behind it raises a ``ValueError`` when the environment builds its specs.
    """

    def __init__(self, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]) -> None:
        super().__init__(in_keys=list(in_keys), out_keys=list(out_keys))
        self._added: dict[NestedKey, TensorSpec] | None = None  # what an environment gains by this
        self._acted: TensorDictBase | None = None  # what the policy wrote, while the environment steps

    @abstractmethod
    def _compute(self, root: TensorDictBase, out: TensorDictBase) -> None:
        """Read the action's data from ``root`` and earlier results from ``out``; write into ``out``."""

    @abstractmethod
    def _new_specs(self, specs: Composite) -> dict[NestedKey, TensorSpec]:
        """Specs of the new observations, given the output specs of the environment at this place of the chain."""

    def _acted_keys(self) -> list[NestedKey]:
        """Entries that are read as the policy read and wrote them."""
        return []

    def _action_keys(self) -> list[NestedKey]:
        """The actions among them."""
        return []

    @property
    def environment(self) -> Any:
        """The environment that this transform belongs to; None in a replay buffer or on its own."""
        try:
            return self.container
        except ValueError:  # TorchRL raises where the chain belongs to no environment
            return None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a batch: steps with their ``"next"``, whole rows, or flat data.

        Returns:
            A new tensordict with the results; the input stays as it was.
        """
        out = tensordict.copy()
        step = out.get("next", None)
        self._compute(out, out if step is None else step)
        return out

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(next_tensordict)  # called by a replay buffer with append_transform(invert=True)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # The transforms before this one are about to convert the action for the base environment.
        if self._added is None and self.environment is not None:
            self._added_specs()
        if self._added is not None and (keys := self._acted_keys()):
            self._acted = tensordict.select(*keys, _STEP, strict=False)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        acted, self._acted = self._acted, None
        self._compute(tensordict if acted is None else _as_acted(tensordict, acted), next_tensordict)
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """No action has been taken yet: zeros."""
        batch = tensordict_reset.batch_size  # an environment that is not batch-locked has dimensions before its own
        extra = batch[: len(batch) - len(self.environment.batch_size)]
        for key, spec in self._added_specs().items():
            tensordict_reset.set(key, spec.zero(extra))
        return tensordict_reset

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """An environment that resets itself: zeros on the rows whose episode ended."""
        batch = tensordict_reset.batch_size
        masks = [tensordict.get(key).reshape(*batch, -1).any(-1) for key in self.environment.reset_keys]
        ended = torch.stack(masks).any(0)
        for key in self._added_specs():
            value = tensordict_reset.get(key)
            tensordict_reset.set(key, value.masked_fill(expand_as_right(ended, value), 0))
        return tensordict_reset

    def _added_specs(self) -> dict[NestedKey, TensorSpec]:
        if self._added is None:
            self.environment.output_spec  # noqa: B018 (calls transform_output_spec)
        return self._added or {}

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Add the specs of the new entries.

        Raises:
            ValueError: a transform behind this one changes the action.
        """
        if changed := self._changed_behind():
            raise ValueError(f"{changed} before {type(self).__name__} reads it as the policy wrote it: put it before.")
        specs = output_spec.clone()
        added = self._new_specs(specs)
        self._added = {key: spec.clone() for key, spec in added.items()}
        for key, spec in added.items():
            specs["full_observation_spec"][key] = spec
        return specs

    def _changed_behind(self) -> str:
        """Which transform behind this one changes which action; empty if none does."""
        inner: Any = self
        while isinstance(chain := inner.__dict__["_container"](), Compose):
            behind = list(chain.transforms)[list(chain.transforms).index(inner) + 1 :]
            for other in (module for t in behind for module in t.modules() if isinstance(module, Transform)):
                changed = {*key_list(list(other.in_keys_inv)), *key_list(list(other.out_keys_inv))}
                if actions := changed.intersection(self._action_keys()):
                    return f"{type(other).__name__} changes the action {actions.pop()!r}"
            inner = chain
        return ""

    def set_container(self, container: Any) -> None:
        """Belong to an environment, a chain or a replay buffer."""
        self._added = None
        super().set_container(container)

    def _check_batched_worker_compat(self) -> None:
        raise RuntimeError(f"{type(self).__name__} goes over SerialEnv or ParallelEnv: workers see the action alone.")


def _as_acted(tensordict: TensorDictBase, acted: TensorDictBase) -> TensorDictBase:
    """The base environment's input, with entries as the policy read and wrote them."""
    if acted.batch_size != tensordict.batch_size:  # only some of the rows are stepped
        acted = acted[acted[_STEP].view(acted.batch_size)]
    if isinstance(acted, LazyStackedTensorDict):  # conversations, whose entries of unequal lengths are no tensors
        dim = acted.stack_dim
        each = zip(tensordict.unbind(dim), acted.unbind(dim), strict=True)
        return lazy_stack([_as_acted(*pair) for pair in each], dim)
    changed = [key for key, value in acted.items(True, True) if tensordict.get(key, None) is not value]
    return tensordict.copy().update(acted.select(*changed)) if changed else tensordict
