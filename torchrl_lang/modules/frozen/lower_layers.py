"""Freeze the lower layers of a language model, and compute their states once for all passes over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_lang.functional.decisions import until_last_decision
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.frozen.frozen_copy import fingerprint
from torchrl_lang.modules.frozen.frozen_states import autocast_of, block_list, carried, lower_weights, states_name
from torchrl_lang.modules.hugging_face import FINAL_NORMS, eval_mode
from torchrl_lang.modules.trunk import Trunk, first_trunk, unwrapped
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, FROZEN_STATES, TERMINATED, TOKENS, entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers in the states of rows that are read together: 32 MB of float32, and a few times that inside a block.
_STATES_AT_ONCE = 2**23
_ROUNDING = 1e-3  # relative difference of states
_divided: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def train_top_layers(actor: nn.Module, layers: int, *, dtype: torch.dtype | None = None) -> int:
    """Freeze embeddings and all but the last ``layers`` transformer blocks, in place.

    The last blocks, the final norm and an untied language-model head stay trainable; a head tied to the embeddings is
    frozen with them. ``layers=0`` freezes the whole trunk including its final norm, so only modules that read its
    states train. Parameters that were frozen before stay frozen, and modules outside the trunk, such as value heads,
    do not change.

    :func:`~torchrl_lang.transforms.frozen_copy` of such an actor copies only the trained blocks.

    Args:
        actor: a language actor, an utterance actor or a Hugging Face model; its first trunk is used.
        layers: number of trainable blocks.
        dtype: of the frozen blocks' weights and of what they compute, such as ``torch.bfloat16``: half the memory, and
            faster where the hardware computes in it. All else, the embeddings and the head among it, keeps its dtype,
            so the blocks that train lose no small updates. Default: the model's.

    Returns:
        The number of trainable parameters of ``actor``.

    Raises:
        ValueError: there is no trunk or its blocks are not found, ``layers`` is out of range, or nothing would train.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor
        >>> from torchrl_lang.modules.frozen.lower_layers import train_top_layers
        >>> lm = causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16)
        >>> whole = sum(p.numel() for p in lm.parameters())
        >>> block = sum(p.numel() for p in lm.model.layers[2].parameters())
        >>> train_top_layers(language_actor(lm), 1) == block + 8 + 11 * 8  # with the final norm and the head
        True
    """
    model = _headless(actor)
    blocks = transformer_blocks(model)
    if not 0 <= layers <= len(blocks):
        raise ValueError(f"Cannot train {layers} of the model's {len(blocks)} layers: give a number up to that.")
    trains, within = set(blocks[len(blocks) - layers :].parameters()), set(blocks.parameters())
    if layers:  # the final norm by its name, because the embeddings are outside of the blocks, too
        outside = {name: p for name, p in model.named_parameters() if p not in within}
        trains |= {p for name, p in outside.items() if set(name.split(".")) & set(FINAL_NORMS)}
    frozen = set(model.parameters()) - trains
    training = sum(p.numel() for p in actor.parameters() if p.requires_grad and p not in frozen)
    if not training:
        raise ValueError(f"With layers={layers} nothing would train: the head is frozen. Train at least one block.")
    for parameter in frozen:
        parameter.requires_grad_(False)
    lower = blocks[: len(blocks) - layers]
    if dtype is not None and any(parameter.dtype != dtype for parameter in lower.parameters()):
        lower.to(dtype)
        norms = [module for name, module in model.named_modules() if name in FINAL_NORMS]
        for module in (*blocks, *norms):
            module.register_forward_pre_hook(_in_own_dtype, with_kwargs=True)
    return training


def _in_own_dtype(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The states that a block or a norm reads, and rotary embeddings of positions, in the dtype of its weights."""
    dtype = next(module.parameters()).dtype
    rotary = kwargs.get("position_embeddings")
    if rotary is not None:
        kwargs = {**kwargs, "position_embeddings": tuple(part.to(dtype) for part in rotary)}
    return (args[0].to(dtype), *args[1:]), kwargs


def with_frozen_states(
    actor: nn.Module, rows: TensorDictBase, *, limit: int | None = None, decisions_only: bool = False
) -> TensorDictBase:
    """Rows that carry the states below the first trained layer, so that no pass over them computes these again.

    For training in which the lower layers never change, see :func:`train_top_layers`, if rows are read several times:
    in several epochs, or by a policy and its :func:`~torchrl_lang.transforms.frozen_copy`. A trunk that has the same
    lower layers (the same tensors, frozen and unchanged) reads on from there in losses, references and
    :func:`~torchrl_lang.modules.row_log_prob`; others read the tokens, and so does one whose rows have changed. Hidden
    states, losses and gradients are the same.

    States that an :class:`~torchrl_lang.modules.UtteranceActor` has computed while it acted, see
    :meth:`~torchrl_lang.modules.UtteranceActor.keeping_states`, are not computed again. It never reads what a row has
    behind its last decision, so this needs ``decisions_only`` and serves rows that are ``terminated``. Nor does it read
    the token before the forced end of an utterance that fills all slots: where the last one does, the row is read.

    Args:
        actor: a language actor, an utterance actor or a loss with one; its first trunk is used.
        rows: ``[*B]``, with ``tokens`` (int64) and ``attention_mask`` (bool), ``[*B, T]``, for ``decisions_only`` also
            ``agent_mask`` (bool ``[*B, T]``) and ``terminated`` (bool ``[*B, 1]``). Not changed.
        limit: bytes that the states may take; default any number.
        decisions_only: only up to the last decision of each row, and all of rows that are not terminated: what the
            losses of policies without a ``transition_weight``, their values and references read. What reads further
            reads the tokens.

    Returns:
        A shallow copy with the entry ``frozen_states``, up to the longest row: as many bytes as states,
        ``B * T * H`` numbers of the model's dtype. Rows of two calls may so have states of different widths and cannot
        be joined: call it on the joined rows. The same rows if that is more than the limit, there are no rows, no layer
        is frozen, there is no trunk, or the model cannot be divided.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor, train_top_layers, with_frozen_states
        >>> actor = language_actor(causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16))
        >>> _ = train_top_layers(actor, 1)
        >>> tokens, mask = torch.randint(11, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
        >>> rows = TensorDict(tokens=tokens, attention_mask=mask, batch_size=[2])
        >>> carrying = with_frozen_states(actor, rows)
        >>> torch.testing.assert_close(actor(carrying)["logits"], actor(rows)["logits"])
    """
    trunk = first_trunk(actor)
    if trunk is None or not trunk.frozen_layers or not rows.get(TOKENS).numel():
        return rows
    tokens, mask = rows.get(TOKENS).long(), rows.get(ATTENTION_MASK)
    if decisions_only:
        mask = until_last_decision(mask, entry(rows, AGENT_MASK), entry(rows, TERMINATED).squeeze(-1))
    longest = max(int(mask.sum(-1).max()), 1)
    shape, device = tokens.shape[:-1], trunk.model.device
    tokens, mask = (x[..., :longest].reshape(-1, longest) for x in (tokens, mask))
    numbers = trunk.width * longest
    if limit is not None and len(tokens) * numbers * trunk.model.dtype.itemsize > limit:
        return rows
    if not _divides(trunk, tokens[:1].to(device)):
        return rows
    name = str(states_name(trunk.model, trunk.frozen_layers))
    kept = actor.kept_states() if isinstance(actor, UtteranceActor) else None
    found = {} if kept is None or kept.name != name else kept.find(tokens, mask.sum(-1))
    states = {row: own.to(tokens.device) for row, own in found.items()}
    unread, size = [row for row in range(len(tokens)) if row not in states], max(_STATES_AT_ONCE // numbers, 1)
    for start in range(0, len(unread), size):
        part = unread[start : start + size]
        computed = trunk.frozen_states(tokens[part].to(device), mask[part].to(device)).get((name, "states"))
        states.update(zip(part, computed.to(tokens.device), strict=True))
    padded = nn.utils.rnn.pad_sequence([states[row] for row in range(len(tokens))], batch_first=True)
    return rows.copy().set(FROZEN_STATES, carried(name, padded, tokens, mask).reshape(shape))


def _divides(trunk: Trunk, row: Tensor) -> bool:
    """Whether a model's layers can run in two parts; some change what enters the first one, such as by a factor."""
    if trunk.model not in _divided:
        real = torch.ones_like(row, dtype=torch.bool)
        with torch.no_grad(), eval_mode(trunk):
            one, other = trunk(row, real), trunk(row, real, frozen=trunk.frozen_states(row, real))
        _divided[trunk.model] = _are_alike(one.double(), other.double())
    return _divided[trunk.model]


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether states of the same tokens differ by rounding alone."""
    return bool((one - other).abs().mean() <= _ROUNDING * one.abs().mean())


class StatesOfRows:
    """Hands the states of :func:`~torchrl_lang.modules.with_frozen_states` on between models that were loaded apart.

    There a model reads the states of its own tensors only. Here the contents count: the states of the last rows are
    handed on to the same rows if the lower layers have the same weights, bit by bit, and the same dtype, device and
    autocast. One row is computed, because configurations may differ as well.

    Examples:
        >>> import copy
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import causal_lm, language_actor, train_top_layers
        >>> from torchrl_lang.modules.frozen.lower_layers import StatesOfRows
        >>> lm = causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16)
        >>> one, other = (language_actor(copy.deepcopy(lm)) for _ in range(2))
        >>> _ = train_top_layers(one, 1), train_top_layers(other, 1)
        >>> tokens, mask = torch.randint(11, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
        >>> rows, states = TensorDict(tokens=tokens, attention_mask=mask, batch_size=[2]), StatesOfRows()
        >>> first, then = states.carrying(one, rows), states.carrying(other, rows)
        >>> torch.testing.assert_close(one(first)["logits"], other(then)["logits"])
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple[str, ...], TensorDictBase] | None = None

    def carrying(self, actor: nn.Module, rows: TensorDictBase, *, limit: int | None = None) -> TensorDictBase:
        """As :func:`~torchrl_lang.modules.with_frozen_states`, with states of an earlier call where they are the same.

        Args:
            actor: a language actor, an utterance actor or a loss with one.
            rows: ``[N]``, with ``tokens`` and ``attention_mask``, ``[N, T]``.
            limit: bytes that the states may take; default any number.
        """
        trunk = first_trunk(actor)
        if trunk is None or not trunk.frozen_layers:
            return rows
        lower = _lower_contents(trunk)
        if self._kept is not None and self._kept[0] == lower and _are_of(self._kept[1], trunk, rows):
            name = str(states_name(trunk.model, trunk.frozen_layers))
            return rows.copy().set(FROZEN_STATES, TensorDict({name: self._kept[1]}, batch_size=rows.batch_size))
        carrying = with_frozen_states(actor, rows, limit=limit)
        found = carrying.get(FROZEN_STATES, None)
        self._kept = None if found is None else (lower, next(iter(found.values())))
        return carrying


def _lower_contents(trunk: Trunk) -> tuple[str, ...]:
    """Identify the weights, device and autocast that the states below the first trained layer depend on."""
    weights = lower_weights(trunk.model, trunk.frozen_layers)
    digest = fingerprint((str(number), weight) for number, weight in enumerate(weights))
    device = weights[0].device
    return bytes(digest.tolist()).hex(), str(device), str(autocast_of(device))


def _are_of(kept: TensorDictBase, trunk: Trunk, rows: TensorDictBase) -> bool:
    """Whether states ``[N, L]`` are those of these rows, and of the trunk in the first row."""
    tokens, mask = rows.get(TOKENS).long(), rows.get(ATTENTION_MASK)
    known: Tensor = kept.get(TOKENS)
    width = known.shape[-1]
    if len(known) != len(tokens) or bool(mask[:, width:].any()):
        return False
    if not torch.equal(known, ((tokens + 1) * mask)[:, :width]):
        return False
    device = trunk.model.device
    own, real = tokens[:1, :width].to(device), mask[:1, :width]
    states = next(iter(trunk.frozen_states(own, real.to(device)).values())).get("states")
    return _are_alike(kept.get("states")[:1][real], states.to(tokens.device)[real])


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The transformer blocks of a trunk or a Hugging Face model: its one list of ``num_hidden_layers`` modules.

    Raises:
        ValueError: there is no such list, or more than one.

    Examples:
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.modules.frozen.lower_layers import transformer_blocks
        >>> lm = causal_lm(vocab_size=11, layers=2, width=8, heads=2, max_length=16)
        >>> transformer_blocks(lm) is lm.transformer.h
        True
    """
    return block_list(_headless(model))[1]


def _headless(module: nn.Module) -> PreTrainedModel:
    from transformers import PreTrainedModel  # a local import, because it takes a second

    for child in unwrapped(module).modules():
        if isinstance(child, Trunk):
            return child.model
        if isinstance(child, PreTrainedModel):
            return child.base_model
    raise ValueError(f"{type(module).__name__} holds neither a Trunk nor a Hugging Face model: nothing to freeze.")
