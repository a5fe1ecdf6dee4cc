"""Frozen copies of an actor that share the weights which do not train, their fingerprints, and the current policy."""

from __future__ import annotations

import copy
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchrl_lang.modules.hugging_face import (
    adapter_layers,
    adapter_weights,
    eval_mode,
    refuse_merged,
    without_adapters,
)
from torchrl_lang.modules.sharding import refuse_sharded, whole_tensor

_CHUNK = 1 << 22  # elements copied to the CPU at a time


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> Tensor:
    """BLAKE2b-256 (RFC 7693) over name, dtype, shape and bytes of each tensor, in the given order.

    Any dtype, device and memory layout; about a second for each gigabyte of weights.

    Args:
        tensors: names and tensors, e.g. ``module.named_parameters()``.

    Returns:
        uint8 ``[32]`` on the CPU.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.frozen.frozen_copy import fingerprint
        >>> weight = torch.arange(6.0).reshape(2, 3)
        >>> same = fingerprint([("weight", weight.T.contiguous().T)])
        >>> torch.equal(fingerprint([("weight", weight)]), same), torch.equal(fingerprint([("bias", weight)]), same)
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=32)
    for name, part in tensors:
        tensor = whole_tensor(part)
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode() + b"\n")
        flat = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg().reshape(-1)
        for chunk in flat.split(_CHUNK):
            digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def defining_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of ``module`` by name, each once.

    Non-persistent buffers are left out: they follow from the configuration.
    """
    yield from module.named_parameters()
    derived = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name in child._non_persistent_buffers_set
    }
    for name, buffer in module.named_buffers():
        if name not in derived:
            yield name, buffer


class HeldActor(ABC):
    """An actor that a transform or loss runs without having its weights among its own parameters.

    It is no ``nn.Module``, so that an object that has it as an attribute does not register its weights.
    """

    def __init__(self, actor: TensorDictModuleBase) -> None:
        self.actor = actor
        """The module to run."""
        self._thread: int | None = threading.get_ident()

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """The context in which to run the actor."""

    def _in_own_thread(self) -> bool:
        """Whether this thread made this object or, for a copy, was the first that asked; True when compiling."""
        if torch.compiler.is_compiling():
            return True
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()


class CurrentPolicy(HeldActor):
    """An actor that continues to train, run without gradients and in evaluation mode.

    The actor is not copied, moved or registered: it belongs to the caller. A copy or pickle would differ from the
    policy after the next training step, so it refuses to run. Evaluation mode affects all threads: the thread that made
    this object may switch it, others may run the policy only while every module is in evaluation mode.

    Args:
        actor: the policy.
    """

    def __init__(self, actor: TensorDictModuleBase) -> None:
        super().__init__(actor)
        self._original = True

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The context in which to run the policy.

        Raises:
            RuntimeError: this is a copy, or this is another thread than the one that made it and the policy is in
                training mode.
        """
        if not self._original:
            raise RuntimeError("This copy of the policy would not be trained: keep the log-probability in the data.")
        if not self._in_own_thread() and any(module.training for module in self.actor.modules()):
            raise RuntimeError("The policy trains in another thread: use no prefetch=, or call policy.eval().")
        with torch.no_grad(), eval_mode(self.actor):
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_original": False, "_thread": None}


class FrozenActor(HeldActor):
    """An actor whose weights do not change, to be run within :meth:`eval_mode`.

    Made by :func:`frozen_copy` or :func:`adapters_off`. It is no ``nn.Module``, so a module that keeps it as an
    attribute does not register its weights. It can be pickled and deep-copied.

    Args:
        actor: the module to run.
        shared: names of the weights that are the policy's own; the others are ``actor``'s alone.
        copied: True where ``actor`` is the reference's own copy, in evaluation mode.
        differentiable: whether gradients flow through the reference.
        adapters: the policy's PEFT layers, which may merge their adapters into weights that are shared.
    """

    def __init__(
        self,
        actor: TensorDictModuleBase,
        shared: Collection[str],
        *,
        copied: bool,
        differentiable: bool = False,
        adapters: Collection[Any] = (),
    ) -> None:
        super().__init__(actor)
        self._adapters, self._shared_names = list(adapters), frozenset(shared)
        self._copied, self.differentiable = copied, differentiable
        self._fingerprint: Tensor | None = None
        self._remember()

    def eval_mode(self) -> AbstractContextManager[Any]:
        """The context in which to run ``actor``: evaluation mode, no gradients, and adapters off if so made.

        Adapters are switched for all threads at once, so only the thread that made the reference may do it (of a copy,
        the first that does).

        Raises:
            RuntimeError: another thread, such as that of a prefetching replay buffer, switches adapters off.
        """
        if self._copied:
            # One that may train is registered in a transform, whose train() reaches it.
            return eval_mode(self.actor) if self.differentiable else torch.no_grad()
        if not self._in_own_thread():
            raise RuntimeError("adapters_off was called in another thread: use frozen_copy(actor), or no prefetch=.")
        return without_adapters(self.actor)

    @property
    def fingerprint(self) -> Tensor:
        """Fingerprint, uint8 ``[32]``, of all weights that define the reference."""
        if self._fingerprint is None:
            self._fingerprint = self._current()
        return self._fingerprint

    def state(self) -> dict[str, Tensor]:
        """All weights that define the reference by name; detached, not copied."""
        return {name: tensor.detach() for name, tensor in self._weights()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights in ``state``; those that are shared with the policy must be equal already.

        Args:
            state: the result of :meth:`state`.

        Raises:
            ValueError: names, shapes or dtypes differ, or a shared weight does; nothing has been changed then.
        """
        own = dict(self._weights())
        kinds, theirs = ({n: (t.shape, t.dtype) for n, t in weights.items()} for weights in (own, state))
        differ = [name for name in kinds.keys() | theirs.keys() if kinds.get(name) != theirs.get(name)]
        differ = differ or [n for n in self._shared_names if not torch.equal(own[n], state[n].to(own[n].device))]
        if differ:
            advice = "load the policy first, convert it by .to(dtype), or use frozen_copy(actor, share=False)"
            raise ValueError(f"The state is of another reference, it differs at {_first(differ)}: {advice}.")
        for name in own.keys() - self._shared_names:
            own[name].copy_(state[name])
        self._remember()

    def accept(self, saved: Tensor) -> bool:
        """Whether the present weights have the fingerprint ``saved``: then they are the reference's from now on.

        For the moment after loading a policy that shares weights with the reference.
        """
        accepted = torch.equal(saved.cpu(), self._current())
        if accepted:
            self._remember()
        return accepted

    def apply_to_owned(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, as ``nn.Module.to`` passes it, to a copied actor; an actor with adapters is left alone.

        Shared parameters, and so the policy's, are converted with them: they are on one device, in one dtype.
        """
        if self._copied:
            self.check_unchanged()
            self.actor._apply(fn)
            self._remember()

    def check_unchanged(self) -> None:
        """Raise unless the weights shared with the policy are still frozen and the same.

        Weights are compared only where a version counter has changed. Writes through ``.data`` change none and are not
        noticed; PEFT merges adapters that way, so the policy's layers are checked for merged adapters. A compiled
        function skips the check.

        Raises:
            RuntimeError: they train, have changed, or adapters are merged into them.
        """
        if not self._shared_names or torch.compiler.is_compiling():
            return
        found = ""
        if any(layer.merged_adapters for layer in self._adapters):
            found = "changed, adapters are merged into them: unmerge_adapter(), or"
        elif any(tensor.requires_grad for tensor in self._shared):
            found = "were set to train;"
        elif [tensor._version for tensor in self._shared] != self._versions:
            if torch.equal(self._current(), self.fingerprint):
                return self._look()
            found = "were modified;"
        if found:
            raise RuntimeError(f"The reference changed: shared weights {found} use frozen_copy(actor, share=False).")

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return defining_weights(self.actor) if self._copied else _base_weights(self.actor)

    def _remember(self) -> None:
        """The present weights are those of the reference."""
        # Shared weights need a fingerprint from the start, to compare with when a version counter changes.
        self._fingerprint = self._current() if self._shared_names else None
        self._look()

    def _current(self) -> Tensor:
        return fingerprint(sorted(self._weights()))  # names are unique, so no tensors are compared

    def _look(self) -> None:
        """Store the version counters of the shared weights."""
        self._shared = [tensor for name, tensor in self._weights() if name in self._shared_names]
        self._versions = [tensor._version for tensor in self._shared]

    def __getstate__(self) -> dict[str, Any]:
        self.check_unchanged()
        kept = {key: value for key, value in vars(self).items() if key not in ("_adapters", "_shared", "_versions")}
        return {**kept, "_thread": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._adapters = [] if self._copied else adapter_layers(self.actor)
        self._look()


def frozen_copy(actor: TensorDictModuleBase, *, share: bool = True, differentiable: bool = False) -> FrozenActor:
    """A copy of ``actor`` that stays as it is while ``actor`` trains.

    Weights with ``requires_grad=False`` are shared, weights that train are copied. So a reference of a policy of which
    only the last blocks train (:func:`~torchrl_lang.modules.train_top_layers`) costs those blocks, and one of a head on
    a frozen trunk costs the head. Modules are new and in evaluation mode, buffers are copied.

    A function in the actor (a lambda, a bound method) is shared: a model that it calls must be frozen, or be a
    submodule of the actor.

    Args:
        actor: any module of tensordicts; it is not changed.
        share: False copies everything, for policies whose frozen weights will change later, e.g. by merging adapters.
        differentiable: gradients flow through the reference to its inputs and to the copies of weights that train.
            Everything is copied then.

    Raises:
        ValueError: a lazily initialized weight has no value yet, or weights are to be shared that have PEFT adapters
            merged into them.

    Examples:
        >>> import torch
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3).requires_grad_(False), torch.nn.Linear(3, 1))
        >>> reference = frozen_copy(TensorDictModule(net, in_keys=["x"], out_keys=["y"]))
        >>> copied = reference.actor.module
        >>> copied[0].weight is net[0].weight, copied[1].weight is net[1].weight
        (True, False)
        >>> x = torch.ones(2)
        >>> with reference.eval_mode():
        ...     y = reference.actor(x)
        >>> bool(y == net(x)), y.requires_grad
        (True, False)
    """
    if any(is_lazy(tensor) for tensor in (*actor.parameters(), *actor.buffers())):
        raise ValueError("The actor has weights without a value yet: run it once first.")
    refuse_sharded(actor, "copied")
    share = share and not differentiable
    adapters = adapter_layers(actor) if share else []
    refuse_merged(adapters)
    kept = {id(p): p for p in actor.parameters() if share and not p.requires_grad}
    copied = copy.deepcopy(actor, dict(kept))
    for parameter in copied.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(differentiable and parameter.requires_grad)
    shared = [name for name, parameter in copied.named_parameters() if id(parameter) in kept]
    return FrozenActor(copied.eval(), shared, copied=True, differentiable=differentiable, adapters=adapters)


def adapters_off(actor: TensorDictModuleBase) -> FrozenActor:
    """The same actor, run without its PEFT adapters as the reference; nothing is copied.

    Within :meth:`FrozenActor.eval_mode` the policy itself runs without adapters. Only the thread that called this may
    enter it; others, such as that of a prefetching replay buffer, raise.

    Args:
        actor: contains PEFT layers, e.g. ``language_actor(get_peft_model(lm, config))``.

    Raises:
        ValueError: there are no adapters, they are merged into the base weights, or base weights train as well.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.frozen.frozen_copy import adapters_off
        >>> lm = causal_lm("llama", vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> actor = language_actor(get_peft_model(lm, LoraConfig(target_modules=["q_proj"])))
        >>> reference = adapters_off(actor)
        >>> reference.actor is actor, len(reference.state()) == len(lm.state_dict()) - 2
        (True, True)
    """
    layers = adapter_layers(actor)
    if not layers:
        raise ValueError(f"{type(actor).__name__} has no PEFT adapters to switch off: use frozen_copy(actor).")
    refuse_merged(layers)
    base = list(_base_weights(actor))
    training = [name for name, tensor in base if tensor.requires_grad]
    if training:
        raise ValueError(f"Some weights other than the adapters' train, {_first(training)}: freeze them.")
    return FrozenActor(actor, [name for name, _ in base], copied=False, adapters=layers)


def _base_weights(actor: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of an actor without those of its adapters."""
    adapters = {id(tensor) for tensor in adapter_weights(actor)}
    return ((name, tensor) for name, tensor in defining_weights(actor) if id(tensor) not in adapters)


def _first(names: Collection[str]) -> list[str]:
    return sorted(names)[:3]
