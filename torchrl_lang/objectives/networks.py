"""The networks of a loss: its actor, value heads of any class, and target parameters that are lent to a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import vocabulary_size
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.head_values import ACTION_VALUE, SHAPES, checked_values, with_heads, zero_states
from torchrl_lang.modules.hugging_face import applies_dropout, eval_mode
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.sharding import gathered, whole_tensor
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_of
from torchrl_lang.schema import missing_entry

# -- actors ------------------------------------------------------------------------------------------------------------


def vocabulary(actor: Any) -> int | None:
    """Count the tokens that the policy can write; None where it is unknown."""
    if isinstance(actor, UtteranceActor) and actor.decoder.rule.vocab_size is not None:
        return actor.decoder.rule.vocab_size
    size = vocabulary_size(RowScorer(actor).actor_parts)
    return token_limit(actor) if size is None else size


def token_limit(actor: Any) -> int | None:
    """Count the tokens that the model can read; None where it is unknown."""
    trunk = RowScorer(actor).trunk
    embedding: nn.Module | None = None if trunk is None else trunk.model.get_input_embeddings()
    number = getattr(embedding, "num_embeddings", None)
    return number if isinstance(number, int) else None


# -- heads -------------------------------------------------------------------------------------------------------------


def as_head(loss: Any, name: str, network: Any, value_trunk: nn.Module | None = None) -> TensorDictModuleBase:
    """The head ``name`` of a loss as a module of tensordicts, after a look at what it writes for states of zeros.

    A head is a module of tensordicts, or any module ``hidden [N, H] -> values``.
    """
    kind = loss._kinds[name]
    if not isinstance(network, nn.Module):
        raise TypeError(f"{type(loss).__name__} needs {name} as a module -> {kind}, got {type(network).__name__}.")
    if not isinstance(value_trunk, TensorDictModuleBase | None):
        got = type(value_trunk).__name__
        raise TypeError(f"{type(loss).__name__} needs value_trunk as a Trunk, got a {got}: wrap it, Trunk(model).")
    if not isinstance(network, TensorDictModuleBase):
        network = TensorDictModule(network, in_keys=[HIDDEN], out_keys=[kind])
    written = {str(key) for key in network.out_keys}
    if kind not in written and written & SHAPES.keys():
        raise _wrong_entry(loss, name, network, kind)
    actor = getattr(loss, "actor_network", None)
    if actor is not None and (len(network.out_keys) == 1 or kind in network.out_keys):
        trunk = actor if value_trunk is None else value_trunk
        states = zero_states(network.in_keys, _state_width(actor, value_trunk), [trunk, network])
        if states is not None:
            with torch.no_grad(), eval_mode(network):
                head_values(loss, name, states, network)
    return network


def head_key(loss: Any, name: str, network: TensorDictModuleBase | None = None) -> NestedKey:
    """The entry that a head writes its values to: the one that ``set_keys`` names, or its only one."""
    network, key = getattr(loss, name) if network is None else network, getattr(loss.tensor_keys, loss._kinds[name])
    if key in network.out_keys:
        return key
    if len(network.out_keys) != 1:
        raise _wrong_entry(loss, name, network, key)
    return network.out_keys[0]


def head_values(loss: Any, name: str, states: TensorDictBase, network: TensorDictModuleBase | None = None) -> Tensor:
    """Compute the values of a head, see :func:`read_head`.

    In the first call with a look at their shape, and at the number of tokens that Q has values for: one for every
    token that the policy can write, and for no unknown one.
    """
    network = getattr(loss, name) if network is None else network
    key, kind = head_key(loss, name, network), loss._kinds[name]
    if name in loss._tried or torch.compiler.is_compiling():
        return read_head(network, states, key, kind)
    head, run = f"The {name} of {type(loss).__name__}", lambda: network(states.copy()).get(key)
    found = checked_values(head, kind, states, run)
    if kind == ACTION_VALUE:
        actor, known = loss.actor_network, found.shape[-1]
        needed, layer = vocabulary(actor) or known, vocabulary_size(RowScorer(actor).actor_parts)
        limit = known if layer is None else max(layer, token_limit(actor) or 0)
        if not needed <= known <= limit:
            sizes = f"Q has values for {known} tokens, the policy {needed}, the model {limit}"
            raise ValueError(f"{sizes}: use one vocab_size=.")
    loss._tried = loss._tried | {name}
    return upcast_half(found)


def values_at(loss: Any, name: str, rows: TensorDictBase, place: Tensor, *, detach: bool = False) -> Tensor:
    """Compute the values of a head at places of the flattened batch, from what its trunk wrote into the rows."""
    inputs = gather_inputs(getattr(loss, name).in_keys, rows, place)
    return online_values(loss, name, inputs.detach() if detach else inputs)


def online_values(loss: Any, name: str, states: TensorDictBase) -> Tensor:
    """Compute the values of a head with its trained parameters, also where it is functional."""
    params = loss._modules.get(f"{name}_params")  # no property: that is of a network with parameters of its own
    with nullcontext() if params is None else params.to_module(getattr(loss, name)):
        return head_values(loss, name, states)


@torch.no_grad()
def target_values(loss: Any, name: str, states: TensorDictBase) -> Tensor:
    """Compute the values of a head with its target parameters."""
    with lent(loss._modules[f"target_{name}_params"], getattr(loss, name)):
        return head_values(loss, name, states.detach())


def least_target(loss: Any, states: TensorDictBase) -> Tensor:
    """Compute the minimum of the target heads of a Q with one value an utterance, ``[U]``."""
    return target_values(loss, "qvalue_network", states).amin(-1)


def read_head(network: TensorDictModuleBase, states: TensorDictBase, key: NestedKey, kind: str) -> Tensor:
    """The values that a head writes, at least in float32: ``[N, n_q, V]``, ``[N, n_q]`` or ``[N, 1]`` by their kind."""
    return upcast_half(with_heads(network(states.copy()).get(key), kind))


def gather_inputs(keys: Sequence[NestedKey], rows: TensorDictBase, index: Tensor) -> TensorDictBase:
    """The inputs of a head, ``[B, T, H]`` each, at ``index`` (int64 ``[N]``) of the flattened batch: ``[N, H]``."""
    if missing := [key for key in keys if rows.get(key, None) is None]:
        raise missing_entry("A head", missing, rows, "The trunk must write it.")
    entries = {key: rows.get(key).flatten(0, 1).index_select(0, index) for key in keys}
    return TensorDict(entries, batch_size=index.shape, device=rows.device)


def _state_width(actor: Any, value_trunk: nn.Module | None) -> int | None:
    """The width of the states that value heads read, of ``value_trunk`` or the actor's; None where it is unknown."""
    parts = RowScorer(actor).actor_parts
    module = parts.trunk if value_trunk is None else value_trunk
    trunk = trunk_of(module) or trunk_of(getattr(module, "trunk", None))  # of a PrivilegedTrunk
    if trunk is not None or value_trunk is not None:
        return None if trunk is None else trunk.width
    return getattr(getattr(parts.head, "module", None), "in_features", None)


def _wrong_entry(loss: Any, name: str, network: TensorDictModuleBase, key: NestedKey) -> ValueError:
    return ValueError(
        f"{type(loss).__name__} reads {key!r} of its {name}, which writes {list(network.out_keys)}: give it "
        f"out_keys=[{key!r}], or name the entry with set_keys({loss._kinds[name]}=...)."
    )


# -- parameters -------------------------------------------------------------------------------------------------


def trained_params(module: nn.Module) -> TensorDictParams:
    """The parameters of a module by their names, nested, without buffers and each once: under its first name."""
    return TensorDictParams(TensorDict(dict(module.named_parameters())).unflatten_keys("."), no_convert=True)


def frozen_target(params: TensorDictBase) -> TensorDictParams:
    """Copy parameters as target parameters, which do not train and which TorchRL's target updaters move."""
    return TensorDictParams(params.apply(lambda weight: weight.data.clone(), filter_empty=False), no_convert=True)


@contextmanager
def lent(params: TensorDictBase, module: nn.Module) -> Iterator[None]:
    """A context in which ``module`` computes with ``params`` as constants, in evaluation mode.

    It gets their ``.data``: what ``to_module`` lends itself comes back from the module as trainable parameters, from
    which no target updater can be made. Dropout would make targets noisy, and the maximum of noisy values too large.
    """
    constants = params.data
    if not any(isinstance(weight, DTensor) for weight in constants.values(True, True)):
        with constants.to_module(module), eval_mode(module):
            yield
        return
    trunks = (part for part in module.modules() if isinstance(part, Trunk))
    roots = [trunk.sharded_root for trunk in trunks if trunk.sharded_root is not None]
    with gathered(roots), constants.apply(whole_tensor).to_module(module), eval_mode(module):
        yield


@torch.no_grad()
def without_dropout(trunk: TensorDictModuleBase, rows: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Compute the trunk's states that targets read: those of ``rows`` without dropout.

    That is ``written``, its output in the mode of training, unless it applies dropout now: that costs another pass.
    """
    if not applies_dropout(trunk.modules()):
        return written
    with eval_mode(trunk):
        return trunk(rows.copy())
