"""Heads on states: the keys of their values, their modules of tensordicts, and how a head of any class is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.heads import ActionValueHead, StackedHeads, UtteranceQValueHead, ValueHead
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.trunk import HIDDEN, trunk_of
from torchrl_lang.schema import ATTENTION_MASK

ACTION_VALUE = "action_value"
STATE_VALUE = "state_value"
UTTERANCE_VALUE = "utterance_value"

SHAPES = {ACTION_VALUE: "[N, n_q, V] or [N, V]", UTTERANCE_VALUE: "[N, n_q] or [N]", STATE_VALUE: "[N, 1] or [N]"}
_STATES = 3  # more than one, so that other orders of the axes show


def zero_states(keys: Iterable[NestedKey], width: int | None, modules: Iterable[nn.Module]) -> TensorDict | None:
    """States ``[3, H]`` of zeros in the dtype of ``modules``, the trunk first.

    None where the width or an entry is unknown, or weights are not here as a whole.
    """
    keys, weights = list(keys), [weight for module in modules for weight in module.parameters()]
    if width is None or not set(keys) <= {HIDDEN}:
        return None
    if any(weight.is_meta or isinstance(weight, DTensor) for weight in weights):
        return None
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
    zeros = torch.zeros(_STATES, width, dtype=dtype, device=weights[0].device if weights else None)
    return TensorDict(dict.fromkeys(keys, zeros), batch_size=[_STATES])


def checked_values(head: str, kind: str, states: TensorDictBase, run: Callable[[], Tensor]) -> Tensor:
    """The values that ``run`` computes from states, with an axis of heads.

    Args:
        head: what the head is called in errors.
        kind: ``"action_value"``, ``"utterance_value"`` or ``"state_value"``.
        states: ``[N]``, what the head reads.
        run: applies the head to them.

    Raises:
        ValueError: the head fails, or writes another shape or numbers that are not floating-point.
    """
    try:
        found = run()
    except Exception as error:
        given = ", ".join(f"{key} {list(value.shape)} of {value.dtype}" for key, value in states.items())
        raise ValueError(f"{head} fails on states of this model, {given}. ({error})") from error
    values = with_heads(found, kind)
    axes, last = 3 if kind == ACTION_VALUE else 2, 1 if kind == STATE_VALUE else values.shape[-1]
    fits = values.ndim == axes and values.shape[0] == states.shape[0] and values.shape[-1] == last
    if not fits or not values.is_floating_point():
        raise ValueError(f"{head} must write floats {SHAPES[kind]}, got {[*found.shape]} of {found.dtype}.")
    return values


def qvalue_module(head: ActionValueHead | UtteranceQValueHead) -> TensorDictModule:
    """``hidden`` ``[*N, H]`` -> ``action_value`` ``[*N, n_q, V]``.

    A :class:`UtteranceQValueHead` writes ``utterance_value`` ``[*N, n_q]``. It is for heads of this library: a module
    of your own, ``hidden [N, H] -> values``, is given to a loss as it is.

    Raises:
        TypeError: it is another module.

    Examples:
        >>> from torchrl_lang.modules import QValueHead, qvalue_module
        >>> qvalue_module(QValueHead(8, 5)).in_keys
        ['hidden']
    """
    return _head_module(head, UTTERANCE_VALUE if isinstance(head, UtteranceQValueHead) else ACTION_VALUE)


def value_module(head: ValueHead) -> TensorDictModule:
    """``hidden`` ``[*N, H]`` -> ``state_value`` ``[*N, 1]``; as :func:`qvalue_module`."""
    return _head_module(head, STATE_VALUE)


def _head_module(head: nn.Module, key: str) -> TensorDictModule:
    if not isinstance(head, StackedHeads):
        found = f"A {type(head).__name__} is no head of this library"
        raise TypeError(f"{found}: give a module of your own to the loss as it is, hidden [N, H] -> values.")
    return TensorDictModule(head, in_keys=[HIDDEN], out_keys=[key])


def row_value_module(actor: nn.Module, head: ValueHead) -> TensorDictSequential:
    """The value of each row, at its last real token: a critic for TorchRL's losses on steps of a rollout.

    Args:
        actor: whose trunk reads the rows, a language actor or an :class:`~torchrl_lang.modules.UtteranceActor`. It is
            shared; :func:`~torchrl_lang.modules.language_actor` of another model gives a trunk of its own.
        head: its ``state_value`` of the last state.

    Returns:
        ``tokens``, ``attention_mask`` ``[*B, T]`` -> ``state_value`` float ``[*B, 1]``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import ValueHead, causal_lm, language_actor, row_value_module
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> critic = row_value_module(language_actor(lm), ValueHead(8))
        >>> rows = TensorDict(tokens=torch.zeros(2, 5, dtype=torch.int64),
        ...                   attention_mask=torch.ones(2, 5, dtype=torch.bool), batch_size=[2])
        >>> critic(rows)["state_value"].shape
        torch.Size([2, 1])
    """
    decoder = getattr(actor, "decoder", None)
    trunk = split_actor(actor if decoder is None else decoder.actor).trunk
    last = TensorDictModule(_last_state, in_keys=[HIDDEN, ATTENTION_MASK], out_keys=[HIDDEN])
    return TensorDictSequential(trunk, last, value_module(head), selected_out_keys=[STATE_VALUE])


def _last_state(states: Tensor, attention_mask: Tensor) -> Tensor:
    """States ``[*B, T, H]`` at the last real tokens, ``[*B, H]``."""
    place = (attention_mask.sum(-1, keepdim=True) - 1).clamp_min(0).unsqueeze(-1)
    return states.take_along_dim(place, -2).squeeze(-2)


def with_heads(values: Tensor, kind: str) -> Tensor:
    """Give the values of a head an axis of heads: ``[N, V]`` as one Q head, ``[N, 1, V]``, and ``[N]`` as ``[N, 1]``.

    ``kind`` is ``"action_value"``, ``"utterance_value"`` or ``"state_value"``.

    Examples:
        >>> import torch

        >>> with_heads(torch.zeros(3, 5), "action_value").shape, with_heads(torch.zeros(3, 1), "state_value").shape
        (torch.Size([3, 1, 5]), torch.Size([3, 1]))
    """
    return values.unsqueeze(1) if values.ndim == (2 if kind == ACTION_VALUE else 1) else values


_WRITES = {ACTION_VALUE: ActionValueHead, STATE_VALUE: ValueHead, UTTERANCE_VALUE: UtteranceQValueHead}
"""The class of the heads of this library by the key of their values."""


States = dict[str, Tensor]
"""Outputs of a trunk at one position of each row: ``hidden`` or ``logits``, each ``[N, …]``."""


def apply_head(head: nn.Module, states: Mapping[str, Tensor], out_key: str) -> Tensor:
    """Run a head on states: a TensorDictModule by its keys, other heads on ``hidden``.

    Values have an axis of heads, as those of this library's heads.
    """
    own: Any = head
    keys: Any = read_keys(head)
    if type(head) is TensorDictModule and len(keys) == len(own.out_keys) == 1:
        own = own.module  # the same, without a tensordict for every token
    if missing := [key for key in keys if key not in states]:
        raise missing_state(missing[0], states, own)
    if isinstance(own, TensorDictModuleBase):
        inputs = {key: states[key] for key in keys}
        found = own(TensorDict(inputs, batch_size=states[keys[0]].shape[:1])).get(out_key)
    else:
        found = own(states[keys[0]])
    return with_heads(found, out_key) if out_key in _WRITES else found


def check_writes(name: str, head: nn.Module | None, key: str) -> None:
    """Raise ValueError if a head, given as argument ``name``, cannot write ``key``, a key of values."""
    writes = key in head.out_keys if isinstance(head, TensorDictModuleBase) else isinstance(head, _WRITES[key])
    if not writes and isinstance(head, TensorDictModuleBase | StackedHeads):
        raise ValueError(f"{name} must write '{key}', a {type(head).__name__} does not.")


def read_keys(head: nn.Module) -> list[NestedKey]:
    """The states that a head reads."""
    return list(head.in_keys) if isinstance(head, TensorDictModuleBase) else [HIDDEN]


def missing_state(key: NestedKey, written: Iterable[NestedKey], head: nn.Module) -> KeyError:
    """The error where a head reads a state that its trunk does not write."""
    found = f"{type(head).__name__} reads '{key}' but the model writes {sorted(map(str, written))}"
    return KeyError(f"{found}: give the head a trunk that writes it.")


def check_head(name: str, head: nn.Module, kind: str, trunk: TensorDictModuleBase, vocabulary: int | None) -> None:
    """Raise unless the head reads states of the trunk; it is tried out on zeros."""
    model = trunk_of(trunk)
    keys = read_keys(head)
    check_writes(name, head, kind)
    if unwritten := [key for key in keys if key not in trunk.out_keys]:
        raise missing_state(unwritten[0], trunk.out_keys, getattr(head, "module", head))
    states = None if model is None else zero_states(keys, model.width, [model, head])
    if states is None:
        return
    with torch.no_grad(), eval_mode(head):
        values = checked_values(name, kind, states, lambda: apply_head(head, dict(states.items()), kind))
    if kind == ACTION_VALUE and vocabulary not in (None, values.shape[-1]):
        raise ValueError(f"The Q head has values for {values.shape[-1]} tokens, but the model logits for {vocabulary}.")
