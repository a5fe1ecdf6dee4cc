"""Models whose weights :func:`torch.distributed.fsdp.fully_shard` (FSDP2) has sharded over processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from tensordict import TensorDictParams
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from torchrl_lang import _ranks

T = TypeVar("T")

_CALL = "_torchrl_lang_call"
_STATE = "__composable_api_state_key"  # the names of what fully_shard adds to a module begin so
_gathered: WeakSet[nn.Module] = WeakSet()

_ADVICE = (
    "Apply fully_shard to the blocks and then to the language model itself, fully_shard(lm), without "
    "reshard_after_forward=True there, and build the actor from that model: language_actor(lm)."
)


def refuse_untied(headless: Any) -> None:
    """Raise RuntimeError if a model was sharded without its head although both share a weight."""
    if headless.config.tie_word_embeddings:
        raise RuntimeError(f"The head is tied to the embedding, which was sharded without it. {_ADVICE}")


def run_through(root: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that runs parts of a sharded model as if it were the model's own forward.

    Weights that belong to no block are gathered before, and stay gathered for heads that read the states afterwards; a
    RuntimeError if the head's weight is sharded again after the call.
    """
    if root in _gathered:
        return function(*args, **kwargs)
    if not hasattr(root, _CALL):
        setattr(root, _CALL, MethodType(_call, root))
        register_fsdp_forward_method(root, _CALL)
    result = getattr(root, _CALL)(function, *args, **kwargs)
    find_head: Any = getattr(root, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    if head is not None and not isinstance(head, FSDPModule) and isinstance(head.weight, DTensor):
        raise RuntimeError(f"The language-model head is sharded again before it is read. {_ADVICE}")
    return result


def _call(root: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(*args, **kwargs)


def whole_weight(module: Any) -> Tensor:
    """The weight of a module; a RuntimeError if it is sharded and has not been gathered."""
    weight: Tensor = module.weight
    if isinstance(weight, DTensor):
        raise RuntimeError(f"The weight of {type(module).__name__} is sharded and has not been gathered. {_ADVICE}")
    return weight


def refuse_sharded(module: nn.Module, what: str) -> None:
    """Raise ValueError if weights of ``module`` are sharded."""
    parts = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if parts or any(isinstance(child, FSDPModule) for child in module.modules()):
        raise ValueError(f"Sharded weights cannot be {what}: do so before fully_shard, or load a second model.")


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gather all weights of sharded modules inside a ``with`` block, without gradients or further communication.

    All processes must enter the block equally often; inside it each may run its modules any number of times.
    """
    found: Any = dict.fromkeys(part for module in modules for part in module.modules() if isinstance(part, FSDPModule))
    parts = [part for part in found if part not in _gathered]
    for part in parts:
        part.unshard()
    hooks = [(table, dict(table)) for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    try:
        for table, _ in hooks:  # these hooks would shard each block again after its forward
            _remove_hooks(table)
        _gathered.update(parts)
        # Compiled code would read weights that were gathered before.
        with torch.compiler.set_stance("force_eager") if parts else nullcontext():
            yield
    finally:
        for table, before in hooks:
            table.clear()
            table.update(before)
        for part in parts:
            _gathered.discard(part)
            part.reshard()


# -- models that are sharded as a whole, see shard --------------------------------------------------------------------

_models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in the order in which they were sharded


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shard the weights of a model's blocks, and of all else in it, over the processes of a mesh.

    Before an optimizer is made of its parameters.
    """
    # Nothing writes into the states that a model returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _models[model] = None


def any_sharded() -> bool:
    """Whether there are models that :func:`shard` has sharded."""
    return bool(_models)


@contextmanager
def all_gathered() -> Iterator[None]:
    """Gather those models and heads, see :func:`gathered`, so that one process may run them without the others."""
    with gathered(list(_models)), ExitStack() as stack:
        for heads in _heads.values():
            stack.enter_context(heads.gathered())
        yield


def unshard(*, keep: bool) -> None:
    """Make plain modules of those models, which ``keep`` their whole weights or lose them.

    Optimizers and others that hold the sharded parameters hold them still.
    """
    while _heads:
        _heads.popitem()[1].unshard(keep=keep)
    for model in list(_models):
        del _models[model]
        plain: dict[int, nn.Parameter] = {}  # tied weights stay tied
        for module in model.modules():
            for name, weight in module._parameters.items():
                if isinstance(weight, DTensor):
                    if id(weight) not in plain:
                        whole = whole_tensor(weight.detach())
                        plain[id(weight)] = nn.Parameter(whole if keep else whole.new_empty(0), weight.requires_grad)
                    module._parameters[name] = plain[id(weight)]
        for module in model.modules():
            for name in ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
                _remove_hooks(getattr(module, name))
            for name in [name for name in vars(module) if name == _CALL or name.startswith(_STATE)]:
                del vars(module)[name]
            if isinstance(module, FSDPModule):
                _remove_hooks(module._forward_pre_hooks)
                _remove_hooks(module._forward_hooks)
                module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]


def _remove_hooks(table: dict[int, Any]) -> None:
    """Remove the hooks of FSDP's from the table of a module."""
    for key, hook in list(table.items()):
        if getattr(getattr(hook, "hook", hook), "__module__", "").startswith("torch.distributed.fsdp"):
            del table[key]


# -- value heads -------------------------------------------------------------------------------------------------------


class SharedHeads:
    """Value heads of a loss, of whose weights each process keeps a part.

    They are whole in a call of the loss and up to its backward pass, and while :func:`all_gathered` gathers them. The
    networks hold their whole weights at all times, but the memory of these is freed in between, so modules over the
    same memory, such as a policy's guidance, are whole with them. In between the loss has the parts as parameters,
    which an optimizer trains and a checkpoint writes.

    Args:
        loss: its networks are shared out now.
        names: of the networks, among its children: parameters by name, or modules.
        mesh: of the processes.
    """

    def __init__(self, loss: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
        self.parts: dict[Tensor, Any] = {}
        """The part of each whole weight, a DTensor."""
        self._mesh, self._uses, self._filled = mesh, 0, True
        networks: dict[str, Any] = {name: loss._modules[name] for name in names}
        functional = {name: params for name, params in networks.items() if isinstance(params, TensorDictParams)}
        owned = {weight for name in networks.keys() - functional.keys() for weight in networks[name].parameters()}
        # They are also weights of other modules of the loss, such as an actor that writes values.
        modules = (module for module in loss.modules() if not isinstance(module, TensorDictParams))
        tables: list[dict[str, Any]] = [module._parameters for module in modules]
        held = [(t, own) for t in tables if (own := {name: weight for name, weight in t.items() if weight in owned})]
        shared = {
            name: TensorDictParams(params.apply(self._part, filter_empty=False), no_convert=True)
            for name, params in functional.items()
        }
        self._whole: list[tuple[Any, Any]] = [(loss._modules, functional), *held]
        self._shared: list[tuple[Any, Any]] = [(loss._modules, shared)]
        self._shared += [(t, {name: self._part(weight) for name, weight in own.items()}) for t, own in held]
        self._hooks = [
            loss.register_forward_pre_hook(lambda *_: self._begin()),
            loss.register_forward_hook(lambda *_: self._end(keep=torch.is_grad_enabled()), always_call=True),
        ]
        _exchange(self._shared)
        self._free()
        _heads[loss] = self

    def _part(self, whole: Tensor) -> Any:
        if whole not in self.parts:
            dim = max(range(whole.ndim), key=whole.shape.__getitem__)
            part: Any = distribute_tensor(whole.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
            self.parts[whole] = nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part
        return self.parts[whole]

    def _begin(self) -> None:
        if not self._filled:
            for whole, part in self.parts.items():
                whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
                whole.data.copy_(whole_tensor(part.detach()))
            self._filled = True
        self._uses += 1
        _exchange(self._whole)

    def _end(self, *, keep: bool) -> None:
        self._uses -= 1
        if not self._uses:
            _exchange(self._shared)
            if not keep:
                self._free()

    def _free(self) -> None:
        self._filled = False
        for whole in self.parts:
            whole.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Whole weights inside a ``with`` block; what is written into them there, by all processes alike, stays."""
        self._begin()
        try:
            yield
        finally:
            for whole, part in self.parts.items():
                local_part(part.detach()).copy_(local_part(sharded_like(part, whole.detach())))
            self._end(keep=False)

    def share_gradients(self) -> None:
        """Give the parts the means over the processes of the whole weights' gradients, and free these."""
        _ranks.average_gradients(self.parts)
        for whole, part in self.parts.items():
            if whole.grad is not None:
                part.grad, whole.grad = sharded_like(part, whole.grad), None
        self._free()

    def unshard(self, *, keep: bool) -> None:
        """Give the loss its whole weights again, which are lost in this process unless it ``keep``-s them."""
        for hook in self._hooks:
            hook.remove()
        self._begin()
        if not keep:
            self._free()


def _exchange(entries: list[tuple[Any, Any]]) -> None:
    for table, values in entries:
        table.update(values)


_heads: WeakKeyDictionary[nn.Module, SharedHeads] = WeakKeyDictionary()  # by their losses


def parts_of(module: nn.Module) -> nn.Module:
    """The parameters that train of a module: its own, or their parts in this process where heads are shared."""
    parts = {whole: part for heads in _heads.values() for whole, part in heads.parts.items()}
    return nn.ParameterList(parts.get(weight, weight) for weight in module.parameters()) if parts else module


def share_gradients() -> None:
    """See :meth:`SharedHeads.share_gradients`; nothing in a single process."""
    for heads in _heads.values():
        heads.share_gradients()


# -- whole tensors -----------------------------------------------------------------------------------------------------


def whole_tensor(value: Any) -> Any:
    """The whole of a sharded tensor, which all processes must ask for; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_like(like: Any, value: Tensor) -> Tensor:
    """The part of a whole tensor that belongs to this process, if ``like`` is sharded, in the same way."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    whole = value.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def load_whole(owner: Any, state: Any) -> None:
    """``owner.load_state_dict(state)`` with a state of whole tensors, where those of the owner are sharded."""
    if not any_sharded():
        owner.load_state_dict(state)
        return
    if not isinstance(owner, Optimizer):
        owner.load_state_dict(_like(owner.state_dict(), state))
        return
    owner.load_state_dict(state)
    for weight, moments in owner.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                moments[name] = sharded_like(weight, value)


def _like(present: Any, state: Any) -> Any:
    if isinstance(state, Mapping) and isinstance(present, Mapping):
        return {key: _like(present.get(key), value) for key, value in state.items()}
    return sharded_like(present, state) if isinstance(state, Tensor) else state


def local_part(value: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value
