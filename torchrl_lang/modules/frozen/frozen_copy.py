"""Frozen references of an actor that share all weights that do not train."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchrl_lang.modules.frozen.adapters import adapter_layers, adapter_weights, refuse_merged, without_adapters
from torchrl_lang.modules.frozen.fingerprint import defining_weights, fingerprint
from torchrl_lang.modules.sharding import refuse_sharded

__all__ = ["FrozenActor", "adapters_off", "frozen_copy"]


class FrozenActor:
    """An actor whose weights do not change, to be run within :meth:`eval_mode`.

    Made by :func:`frozen_copy` or :func:`adapters_off`. It is not an ``nn.Module``, so that modules with such an
    attribute do not register its weights. It can be pickled and deep-copied.

    Args:
        actor: the module to run.
        shared: names of the weights that are shared with the policy; the others belong to ``actor`` alone.
        copied: True if ``actor`` and its submodules are the reference's own objects, in evaluation mode.
        differentiable: whether gradients flow through the reference.
        adapters: the policy's PEFT layers, which may merge their adapters into shared weights.
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
        self.actor = actor
        self._adapters = list(adapters)
        self.differentiable = differentiable
        self._copied = copied
        self._thread: int | None = threading.get_ident()
        self._shared_names = frozenset(shared)
        self._fingerprint: Tensor | None = None
        self._remember()

    def eval_mode(self) -> AbstractContextManager[Any]:
        """The context in which to run ``actor``: evaluation mode, no gradients, and adapters disabled if requested.

        Adapters are disabled for all threads. So only the thread that made the reference may do it (for a copy, the
        first thread that does); otherwise the policy could run without its adapters in another thread.

        Raises:
            RuntimeError: adapters would be disabled by another thread, such as that of a prefetching replay buffer.
        """
        if not self._copied:
            if not self._in_own_thread():
                raise RuntimeError(
                    "adapters_off disables the policy's own adapters, and this is another thread than the one that "
                    "made it (for instance of a replay buffer with prefetch=): the policy could run without its "
                    "adapters. Use frozen_copy(actor), no prefetch=, or call the transform in the training loop."
                )
            return without_adapters(self.actor)
        return nullcontext() if self.differentiable else torch.no_grad()

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
        """Load the weights in ``state``; those that are shared with the policy must be equal already.

        Args:
            state: the result of :meth:`state`.

        Raises:
            ValueError: names, shapes or dtypes differ, or a shared weight does. Nothing is changed then.
        """
        own = dict(self._weights())
        if own.keys() != state.keys():
            raise ValueError(
                f"The state is of another reference: missing {_first(own.keys() - state.keys())}, "
                f"unexpected {_first(state.keys() - own.keys())}."
            )
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        other = [name for name, kind in kinds.items() if kind != (state[name].shape, state[name].dtype)]
        if other:
            raise ValueError(
                f"The state is of another reference: shapes or dtypes differ at {_first(other)}. Convert the transform "
                "to the dtype of the checkpoint before loading (transform.to(dtype))."
            )
        differ = [name for name in self._shared_names if not torch.equal(own[name], state[name].to(own[name].device))]
        if differ:
            raise ValueError(
                f"Weights that the reference shares with the policy differ from the state: {_first(differ)}. Load the "
                "policy first, or make the reference with frozen_copy(actor, share=False)."
            )
        for name, tensor in own.items():
            if name not in self._shared_names:
                tensor.copy_(state[name])
        self._remember()

    def apply_to_owned(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, as ``nn.Module.to`` passes it, to a copied actor, but not to an actor with adapters.

        Shared parameters are converted in the policy, too, because they are on one device in one dtype.
        """
        if self._copied:
            self.check_unchanged()
            self.actor._apply(fn)
            self._remember()

    def check_unchanged(self) -> None:
        """Raise unless the weights shared with the policy are still frozen and unchanged.

        Compares version counters, and the weights themselves only if a counter has changed. Writes through ``.data`` do
        not change counters and are not detected. PEFT merges adapters this way, so the policy's layers are checked for
        it, except by a copy of this object. A function that was compiled around this does not check; a transform checks
        at each reset and each ``state_dict()``.

        Raises:
            RuntimeError: they are not.
        """
        if not self._shared_names or torch.compiler.is_compiling():
            return
        if any(layer.merged_adapters for layer in self._adapters):
            raise RuntimeError(
                "The reference changed: the policy's adapters are merged into weights that the reference shares; call "
                "unmerge_adapter() on the PEFT model, or use frozen_copy(actor, share=False)."
            )
        thawed = any(tensor.requires_grad for tensor in self._shared)
        if not thawed and [tensor._version for tensor in self._shared] == self._versions:
            return
        if thawed or not torch.equal(self._current(), self.fingerprint):
            raise RuntimeError(
                "The reference changed: weights that the reference shares with the policy were "
                f"{'set to train' if thawed else 'modified'}; use frozen_copy(actor, share=False)."
            )
        self._look()

    def _in_own_thread(self) -> bool:
        """Whether this thread made this object or, for a copy, was the first to ask; True when compiling."""
        if torch.compiler.is_compiling():
            return True
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return defining_weights(self.actor) if self._copied else _base_weights(self.actor)

    def _remember(self) -> None:
        """Store the current weights as those of the reference."""
        # Shared weights need a fingerprint from the start, to detect later changes.
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
    """A copy of ``actor`` that does not change while ``actor`` trains.

    Weights with ``requires_grad=False`` are shared, trainable weights are copied. So a reference of a policy of which
    only the last blocks train (:func:`~torchrl_lang.modules.train_top_layers`) takes the memory of those blocks, and
    one of a head on a frozen trunk that of the head. Modules are always new and in evaluation mode, buffers are copied.

    A function in the actor (a lambda, a bound method) is not a module: the copy calls the same function. So a model
    that such a function calls must be frozen, or be a submodule of the actor.

    Args:
        actor: any TensorDictModule; it is not changed.
        share: False copies everything, for policies whose frozen weights may change, e.g. by merging adapters into
            them.
        differentiable: let gradients flow through the reference to its inputs and to copies of trainable weights;
            otherwise it is run without gradients.

    Raises:
        ValueError: a lazily initialised weight has no value yet, or PEFT adapters are merged into weights to share.

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
    lazy = [name for name, tensor in (*actor.named_parameters(), *actor.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"The actor has weights without a value yet, {_first(lazy)}: run it once first.")
    refuse_sharded(actor, "copied")
    adapters = adapter_layers(actor) if share else []
    refuse_merged(adapters)
    kept = {id(p): p for p in actor.parameters() if share and not p.requires_grad}
    copied = copy.deepcopy(actor, {**kept, **_without_graph(actor)})
    for parameter in copied.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(differentiable and parameter.requires_grad)
    shared = [name for name, parameter in copied.named_parameters() if id(parameter) in kept]
    return FrozenActor(copied.eval(), shared, copied=True, differentiable=differentiable, adapters=adapters)


def adapters_off(actor: TensorDictModuleBase) -> FrozenActor:
    """The same actor with its PEFT adapters disabled while it is run as the reference; nothing is copied.

    Inside :meth:`FrozenActor.eval_mode` the policy itself runs without adapters, so leave the context before running
    the policy, and enter it only in the thread that called this function; other threads, such as that of a prefetching
    replay buffer, raise an error.

    Args:
        actor: contains PEFT layers, e.g. ``language_actor(get_peft_model(lm, config))``.

    Raises:
        ValueError: there are no adapters, they are merged into the base weights, or base weights train as well, so
            the reference would change.

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
        raise ValueError(
            f"{len(training)} weights other than the adapters' train, {_first(training)}: without its adapters the "
            "actor would drift, too. Freeze them (bias='none'), or use frozen_copy(actor)."
        )
    return FrozenActor(actor, [name for name, _ in base], copied=False, adapters=layers)


def _base_weights(actor: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights that define an actor, except its adapters."""
    adapters = {id(tensor) for tensor in adapter_weights(actor)}
    return ((name, tensor) for name, tensor in defining_weights(actor) if id(tensor) not in adapters)


def _without_graph(actor: nn.Module) -> dict[int, Tensor]:
    """Detached copies, by id, of tensors that hang in a graph, such as a cached activation: deepcopy takes none."""
    held = [value for module in actor.modules() for value in (*vars(module).values(), *module._buffers.values())]
    return {id(value): value.detach().clone() for value in held if isinstance(value, Tensor) and not value.is_leaf}


def _first(names: Collection[str]) -> list[str]:
    return sorted(names)[:3]
